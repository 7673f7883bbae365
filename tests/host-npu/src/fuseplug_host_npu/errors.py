"""What goes wrong before an op runs."""

from __future__ import annotations


class HostNPUUnavailable(RuntimeError):  # noqa: N818 - it is a state of the machine
    """No NPU can be stood in for here; the message says what is missing and what to run."""


class ContractError(ValueError):
    """A call breaks a documented limit of an op.

    Attributes:
        op: The op's name.
        argument: The argument that is beyond it.
        limit: What the documentation asks for.
        found: What the argument was.
        page: Where the documentation says so.
    """

    def __init__(self, op: str, argument: str, limit: str, found: str, page: str) -> None:
        super().__init__(f"{op}: {argument} must be {limit}; it is {found} (documented in {page})")
        self.op, self.argument, self.limit, self.found, self.page = op, argument, limit, found, page
