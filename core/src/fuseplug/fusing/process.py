"""What fuses the models of this process."""

from __future__ import annotations

import atexit
import functools

from .. import manager
from ..run.options import RunOptions
from .fusing import Fusing


@functools.cache
def fusing() -> Fusing:
    """That of this process, with the options of its ``fuseplug run`` and the manager that its own code uses, too."""
    found = Fusing(RunOptions.from_environment(), manager)
    atexit.register(found.ended)
    return found
