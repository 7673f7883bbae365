"""The `Fusing` of this process, and its log."""

from __future__ import annotations

import atexit
import functools
import logging
import sys

from fuseplug import manager

from ..run.options import RunOptions
from .fusing import Fusing


@functools.cache
def fusing() -> Fusing:
    """The `Fusing` of this process. It has the options of ``fuseplug run``, and the manager that user code also has."""
    _show_log()
    process = Fusing(RunOptions.from_environment(), manager)
    atexit.register(process.ended)
    return process


def _show_log() -> None:
    """Show Fuseplug's log on stderr: the plans of rank 0, kernels that are not in use, and errors on any rank."""
    log = logging.getLogger("fuseplug")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("fuseplug: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
