"""What fuses the models of this process."""

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
    """That of this process, with the options of its ``fuseplug run`` and the manager that its own code uses, too."""
    _show_log()
    process = Fusing(RunOptions.from_environment(), manager)
    atexit.register(process.ended)
    return process


def _show_log() -> None:
    """Show on stderr what Fuseplug logs: the plans of rank 0, kernels not in use, and what goes wrong on any rank."""
    log = logging.getLogger("fuseplug")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("fuseplug: %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
