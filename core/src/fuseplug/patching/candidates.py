"""Turns a proposal into a candidate for verification, and a refusal by verification into a rejection for the report."""

from __future__ import annotations

from fuseplug_verify import Candidate, Refusal

from ..contract import Proposal, Rejection
from ..hookspecs import BaseKernel


def candidate_of(kernel: BaseKernel, proposal: Proposal, *, every_size: bool = False) -> Candidate | Rejection:
    """The candidate that stands for *proposal* of *kernel*; or a rejection, if the reference cannot be loaded.

    Args:
        kernel: The kernel that made *proposal*. Its reference defines the right result.
        proposal: The proposal for one target.
        every_size: Whether the kernel runs its compiled programs for small examples, too.
    """
    try:
        reference = kernel.load_reference()
    except Exception as error:  # noqa: BLE001 - a third party's module may raise anything
        return Rejection(f"{type(error).__name__} while loading {kernel.reference}: {error}", kind="error")
    cls = type(kernel)
    named = (kernel.function, kernel.reference, *(base.__module__ for base in cls.__mro__ if base is not object))
    return Candidate(
        example=proposal.example,
        mixes=proposal.mixes,
        adapters=proposal.adapters,
        reference=reference,
        likely=proposal.likely,
        roundings=proposal.roundings,
        working_roundings=proposal.working_roundings,
        exact=proposal.exact,
        impossible=proposal.impossible,
        lazy=proposal.lazy,
        check_sizes=kernel.check_sizes,
        identity=(
            f"{cls.__module__}.{cls.__qualname__}",
            *(kernel.kernel_id, kernel.function, kernel.reference),
            str(proposal.target),
            every_size,
        ),
        packages=[name.partition(":")[0] for name in named],
    )


def rejection_of(refusal: Refusal) -> Rejection:
    """The rejection that reports *refusal* in a kernel's entry."""
    return Rejection(refusal.reason, kind=refusal.kind)
