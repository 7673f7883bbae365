"""Settings of the site that ``nox -s docs`` builds. Its pages are Markdown, so GitHub shows them, too."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import importlib_metadata
from sphinx.application import Sphinx

project = "Fuseplug"
copyright = "the Fuseplug contributors"  # noqa: A001 - Sphinx's name for it
release = importlib_metadata.version("fuseplug")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

# Paths start at the checkout, not at docs/: links to READMEs and other files are the same here and on GitHub.
root_doc = "docs/index"
include_patterns = ["docs/**.md", "README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md"]
include_patterns += ["kernel-packages/*/README.md", "tests/kit/README.md", "tests/host-npu/README.md"]
exclude_patterns = [".nox", "build", "core", "docs/demo/text", "kernel-packages/*/src", "**/.*"]  # not searched

html_theme = "furo"
html_title = f"Fuseplug {release}"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "index.html"}  # the start page, which redirects to root_doc
copybutton_exclude = ".linenos, .gp, .go"  # line numbers, prompts and output
myst_heading_anchors = 4  # links to headings, as GitHub names them
highlight_language = "none"  # a block without a language is output, and Pygments would colour it as Python
pygments_dark_style = "github-dark"  # furo's default underlines imported names as if they were links
smartquotes_action = "D"  # dashes only: quotes stay straight, so that a reader can search for quoted output

default_role = "py:obj"  # `Name` in a docstring is a link if the name is in the reference, and code if not
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True


def _contents(_: Sphinx, page: str, source: list[str]) -> None:
    """Add the lists of the index as the table of contents, so that it is written once, and in Markdown."""
    if page != root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.MULTILINE)[1:]:
        linked = re.findall(r"^- \[([^]]*)\]\((\S+)\.md\)", section, re.MULTILINE)
        if not linked:
            continue
        pages = "\n".join(f"{title} <{target}>" for title, target in linked)
        caption = section.partition("\n")[0]
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def _command_line(_: Sphinx, page: str, source: list[str]) -> None:
    """Append typer's description of the commands to their page; links replace the sentences that typer cuts off."""
    if page == "docs/reference/cli":
        command = [sys.executable, "-m", "typer", "fuseplug.cli", "utils", "docs", "--name", "fuseplug"]
        written = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
        written = re.sub(r"^\* `(\w+)`: .*\.\.\.$", r"* [`\1`](#fuseplug-\1)", written, flags=re.MULTILINE)
        source[0] += "\n" + written.replace("# `fuseplug`", "## `fuseplug`", 1)


def _signature(*arguments: Any) -> tuple[str, str]:
    """Rewrite ``<factory>`` of a dataclass and ``~P`` in a signature as Python that Sphinx can read and link."""
    *_, signature, returned = arguments
    return signature and re.sub(r"~(?=[A-Z]\b)", "", signature.replace("<factory>", "...")), returned


def setup(app: Sphinx) -> None:
    app.connect("source-read", _contents)
    app.connect("source-read", _command_line)
    app.connect("autodoc-process-signature", _signature)
