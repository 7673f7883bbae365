"""A builder that collects builds, and does them when it is told to."""

import contextvars
import functools
from concurrent.futures import Future


class Promised:
    """Promises builds, and does none until it is told to."""

    def __init__(self):
        self.promised = []

    def prepare(self):
        """Do nothing: what programs share is built when they are."""

    def begin(self, build):
        self.promised.append((Future(), functools.partial(contextvars.copy_context().run, build)))
        return self.promised[-1][0]

    def keep(self):
        """Do all promised builds."""
        for future, function in self.promised:
            future.set_result(function())

    def fail(self):
        """Make all promised builds fail."""
        for future, _ in self.promised:
            future.set_exception(OSError("planted"))
