"""Compiles the stand-in for the installed torch_npu, once for each version of either."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import elf

SOURCE = Path(__file__).with_name("host.c")

RUNTIME = "libascendcl.so"
"""The library that has all functions; the other libraries only refer to it."""

_CANN = re.compile(r"(acl[a-zA-Z]|rt[A-Z]|Msprof|Hccl|Hcom)\w*")
_LIBRARIES = re.compile(r"lib(hccl|ascendcl|acl_op_compiler|ge_runner|graph|acl_tdt_channel)\.so")
_WRITTEN = re.compile(r"\b(?:NOTHING_TO_DO|NO_KERNEL)\((\w+)\)|^[\w *]*?\b(\w+)\([^;]*\) \{", re.MULTILINE)


@dataclass(frozen=True)
class Wanted:
    """The parts of CANN that torch_npu needs.

    Attributes:
        libraries: The shared libraries of CANN that torch_npu is linked against.
        functions: The functions of these libraries without which torch_npu cannot be loaded.
    """

    libraries: tuple[str, ...]
    functions: frozenset[str]


def wanted(package: Path) -> Wanted:
    """Read the needed parts of CANN from the libraries in *package*, the directory of torch_npu.

    A list would not do: the functions differ between releases, and the loader binds all of them, used or not.
    """
    # libop_plugin_atb.so is loaded on demand, with a library of its own (ATB).
    files = [path for path in (*package.glob("_C*.so"), *package.glob("lib/*.so")) if "atb" not in path.name]
    found = [elf.read(path) for path in sorted(files)]
    undefined = frozenset().union(*(each.undefined for each in found))
    defined = frozenset().union(*(each.defined for each in found))
    needed = {name for each in found for name in each.needed if _LIBRARIES.fullmatch(name)}
    return Wanted(tuple(sorted(needed)), frozenset(name for name in undefined - defined if _CANN.fullmatch(name)))


def written(source: str) -> frozenset[str]:
    """The functions that C *source* defines."""
    return frozenset(name for names in _WRITTEN.findall(source) for name in names if name)


def build(package: Path, version: str, cache: Path | None = None) -> Path:
    """Compile the stand-in for the torch_npu in *package*, unless it is already compiled.

    Args:
        package: The directory of torch_npu.
        version: The version of torch_npu.
        cache: Where to keep the compiled libraries; the user's cache directory if ``None``.

    Returns:
        The directory that has the libraries.

    Raises:
        FileNotFoundError: If there is no C compiler.
        subprocess.CalledProcessError: If the compiler fails; ``stderr`` has its messages.
    """
    cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fuseplug"
    recipe = SOURCE.read_bytes() + Path(__file__).read_bytes() + str(package).encode()
    digest = hashlib.sha256(recipe).hexdigest()[:12]
    directory = cache / f"host-npu-{version}-{platform.machine()}-{digest}"
    if directory.is_dir():
        return directory
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=cache))
    try:
        _compile(wanted(package), scratch)
        _move(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return directory


def _move(made: Path, place: Path) -> None:
    # Whole or not at all. If another process, such as a pytest worker, was first, the same files are there already.
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _compile(asked: Wanted, directory: Path) -> None:
    source = directory / SOURCE.name
    text = SOURCE.read_text()
    source.write_text(text)
    rest = sorted(asked.functions - written(text))
    (directory / "generated.inc").write_text("".join(f"long {name}() {{ return 0; }}\n" for name in rest))
    _link(directory, RUNTIME, [str(source)])
    for name in asked.libraries:
        if name != RUNTIME:
            # torch_npu looks up functions by name in each library. dlsym also searches what that library needs.
            _link(directory, name, ["-Wl,--no-as-needed", str(directory / RUNTIME)])


def _link(directory: Path, name: str, inputs: Iterable[str]) -> None:
    compiler = shlex.split(os.environ.get("CC", "cc"))
    # C17: in C23, empty parentheses mean that there are no arguments, and bool is a keyword.
    options = ["-std=gnu17", "-shared", "-fPIC", "-O1", "-w", f"-Wl,-soname,{name}", "-o", str(directory / name)]
    subprocess.run([*compiler, *options, *inputs], check=True, capture_output=True, text=True)  # noqa: S603
