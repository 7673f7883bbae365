"""What is given to an executor, and not done yet."""

import functools
from concurrent.futures import Executor, Future


class Promised(Executor):
    """Promises, and does nothing until it is told to."""

    def __init__(self):
        self.promised = []

    def prepare(self):
        """What programs share is built when they are."""

    def submit(self, function, /, *args):
        self.promised.append((Future(), functools.partial(function, *args)))
        return self.promised[-1][0]

    def keep(self):
        """Do all of it."""
        for future, function in self.promised:
            future.set_result(function())

    def fail(self):
        """Have all of it fail."""
        for future, _ in self.promised:
            future.set_exception(OSError("planted"))
