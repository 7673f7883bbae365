"""Makes the examples of a proposal, always the same ones."""

from __future__ import annotations

from typing import Any

import torch

from ..contract import Example, Proposal, Rejection

SEMANTICS_SIZE = 64
"""Elements wanted in the examples that tell variants apart: as few as the package can do with."""


def example_of(proposal: Proposal, mix: Any, size: int, number: int = 0) -> Example:
    """The example of *proposal* for one mix and size: always the same one, and another for each *number*.

    Raises:
        TypeError: If what the proposal gives is not one.
    """
    example = proposal.example(mix, size, torch.Generator().manual_seed(size + number))
    if not (isinstance(example, Example) and example.args and isinstance(example.args[0], torch.Tensor)):
        raise TypeError(f"example() must give an Example whose first argument is a tensor; it gave {example!r:.80}")
    return example


def mixes_run(proposal: Proposal) -> tuple[Any, ...]:
    """The mixes of *proposal* in which a kernel is run on its device: the first, and the likely ones.

    Unless the proposal names these, they are all in which the module's own tensors have the dtypes that they have now:
    the rest of a mix is the caller's choice, or autocast's.

    Raises:
        TypeError: As `example_of`.
    """
    now, *others = proposal.mixes
    if proposal.likely is not None:
        return (now, *proposal.likely)
    own = _own_dtypes(example_of(proposal, now, 1))
    return (now, *(mix for mix in others if _own_dtypes(example_of(proposal, mix, 1)) == own))


def _own_dtypes(example: Example) -> list[torch.dtype]:
    below = [tensor for child in example.children.values() for tensor in (*child.parameters(), *child.buffers())]
    return [tensor.dtype for tensor in (*example.parameters.values(), *below)]


def raised(doing: str, error: Exception) -> Rejection:
    """What a kernel's code raised while Fuseplug was *doing* something with it."""
    return Rejection(f"{type(error).__name__} while {doing}: {error}", kind="error")
