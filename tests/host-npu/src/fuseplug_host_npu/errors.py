"""What goes wrong before an op runs."""

from __future__ import annotations


class HostNPUUnavailable(RuntimeError):  # noqa: N818 - it is a state of the machine
    """No NPU can be stood in for here; the message says what is missing and what to run."""


class ContractError(RuntimeError):
    """A call breaks a limit of an op: one that is documented, or one that CANN's sources have.

    Attributes:
        op: The op's name.
        argument: The argument that is beyond it.
        limit: What is asked for.
        found: What the argument was.
        page: Where the documentation says so, or the source that does.
    """

    def __init__(self, op: str, argument: str, limit: str, found: str, page: str, *, documented: bool = True) -> None:
        where = f"{'documented' if documented else 'read'} in {page}"
        super().__init__(f"{op}: {argument} must be {limit}; it is {found} ({where})")
        self.op, self.argument, self.limit, self.found, self.page = op, argument, limit, found, page
