"""Imports a page of the documentation from a Python file, because Triton reads the source of a kernel."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from test_docs import blocks


def import_page(page: Path, folder: Path) -> ModuleType:
    """Import the Python blocks of *page* from one file in *folder*."""
    path = folder / f"page_{page.stem.replace('-', '_')}.py"
    path.write_text("\n".join(blocks(page)))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
