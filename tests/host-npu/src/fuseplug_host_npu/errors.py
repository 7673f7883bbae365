"""The errors that are raised before an op runs."""

from __future__ import annotations


class HostNPUUnavailable(RuntimeError):  # noqa: N818 - it is a state of the machine
    """This machine cannot run the stand-in for an NPU; the message says what is missing and what to run."""


class ContractError(RuntimeError):
    """A call breaks a limit of an op, which is documented or was read in CANN's sources.

    Attributes:
        op: The op's name.
        argument: The argument that breaks the limit.
        limit: What the argument must be.
        found: What the argument was.
        page: The page of the documentation, or the source, that says so.
    """

    def __init__(self, op: str, argument: str, limit: str, found: str, page: str, *, documented: bool = True) -> None:
        where = f"{'documented' if documented else 'read'} in {page}"
        super().__init__(f"{op}: {argument} must be {limit}; it is {found} ({where})")
        self.op, self.argument, self.limit, self.found, self.page = op, argument, limit, found, page
