"""What builders were given, and have not done yet."""

import contextvars
import functools
from concurrent.futures import Future


class Promised:
    """Promises, and does nothing until it is told to."""

    def __init__(self):
        self.promised = []

    def prepare(self):
        """What programs share is built when they are."""

    def begin(self, build):
        self.promised.append((Future(), functools.partial(contextvars.copy_context().run, build)))
        return self.promised[-1][0]

    def keep(self):
        """Do all of it."""
        for future, function in self.promised:
            future.set_result(function())

    def fail(self):
        """Have all of it fail."""
        for future, _ in self.promised:
            future.set_exception(OSError("planted"))
