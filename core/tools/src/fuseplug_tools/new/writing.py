"""Renders the templates of a distribution, and writes them."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path, PurePosixPath
from string import Template

from fuseplug.errors import FuseplugError

from .request import Request
from .values import values_of

_EVERYWHERE = {
    "pyproject.toml": "all/pyproject.toml",
    "README.md": "all/README.md",
    "LICENSE": "all/LICENSE",
    ".gitignore": "all/gitignore",
    ".github/workflows/tests.yml": "all/tests.yml",
    "src/{package}/__init__.py": "all/__init__.py",
    "src/{package}/py.typed": "all/py.typed",
}

_OF_A_NEW_OP = {
    "src/{package}/kernels.py": "new/kernels.py",
    "src/{package}/reference.py": "new/reference.py",
    "src/{package}/recognise.py": "new/recognise.py",
    "src/{package}/specimens.py": "new/specimens.py",
    "src/{package}/backend.py": "new/{backend}.py",
    "tests/conftest.py": "all/conftest_{backend}.py",
    "tests/test_kernel.py": "new/test_kernel.py",
}

_OF_A_KNOWN_OP = {
    "src/{package}/kernels.py": "known/kernels.py",
    "src/{package}/backend.py": "{op}/{backend}.py",
    "tests/conftest.py": "all/conftest_{backend}.py",
    "tests/test_kernel.py": "known/test_kernel.py",
}

_EDITS_OF_A_NEW_OP = {
    "reference.py": "your formula",
    "recognise.py": "your structure, and inputs that tell variants apart",
    "specimens.py": "your modules, as models write them",
    "backend.py": "your kernel",
}

_EDITS_OF_A_KNOWN_OP = {
    "kernels.py": "the variants that your kernel computes",
    "backend.py": "your kernel",
}


def write(request: Request, folder: Path) -> tuple[list[PurePosixPath], dict[PurePosixPath, str]]:
    """Write the distribution into *folder*, which does not exist yet or is empty.

    Returns:
        The paths of the files, relative to *folder*, and for some of them what the author is to put there.

    Raises:
        FuseplugError: If *folder* is not empty, or cannot be written.
    """
    rendered = render(request)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FuseplugError(
            f"{folder} is not empty; expected a new folder, because nothing is overwritten: name another with --into"
        )
    try:
        for path, text in rendered.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FuseplugError(
            f"{folder} cannot be written: {error}; expected a place for a new folder: name another with --into"
        ) from error
    edits = _EDITS_OF_A_NEW_OP if request.known_op is None else _EDITS_OF_A_KNOWN_OP
    return list(rendered), {path: edits[path.name] for path in rendered if path.name in edits}


def render(request: Request) -> dict[PurePosixPath, str]:
    """The text of each file."""
    values = values_of(request)
    parts = _EVERYWHERE | (_OF_A_NEW_OP if request.known_op is None else _OF_A_KNOWN_OP)
    templates = files(__package__) / "templates"
    texts = {}
    for path, template in parts.items():
        name = f"{template.format_map(values)}.template"
        if request.known_op is None and not request.tensors and name == "new/recognise.py.template":
            name = "new/recognise_without_tensors.py.template"
        text = templates.joinpath(*name.split("/")).read_text(encoding="utf-8")
        texts[PurePosixPath(path.format_map(values))] = Template(text).substitute(values)
    return texts
