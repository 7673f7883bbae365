"""Makes the examples of a candidate, always the same ones."""

from __future__ import annotations

from typing import Any

import torch

from ..data import Candidate, Example, Refusal

SEMANTICS_SIZE = 64
"""Elements wanted in the examples that tell variants apart: as few as the package can do with."""


def example_of(candidate: Candidate, mix: Any, size: int, number: int = 0) -> Example:
    """The example of *candidate* for one mix and size: always the same one, and another for each *number*.

    Raises:
        TypeError: If what the candidate gives is not one.
    """
    example = candidate.example(mix, size, torch.Generator().manual_seed(size + number))
    if not (isinstance(example, Example) and example.args and isinstance(example.args[0], torch.Tensor)):
        raise TypeError(f"example() must give an Example whose first argument is a tensor; it gave {example!r:.80}")
    return example


def mixes_run(candidate: Candidate) -> tuple[Any, ...]:
    """The mixes of *candidate* in which a kernel is run on its device: the first, and the likely ones.

    Unless the candidate names these, they are all in which the module's own tensors have the dtypes that they have now:
    the rest of a mix is the caller's choice, or autocast's.

    Raises:
        TypeError: As `example_of`.
    """
    now, *others = candidate.mixes
    if candidate.likely is not None:
        return (now, *candidate.likely)
    own = _own_dtypes(example_of(candidate, now, 1))
    return (now, *(mix for mix in others if _own_dtypes(example_of(candidate, mix, 1)) == own))


def _own_dtypes(example: Example) -> list[torch.dtype]:
    below = [tensor for child in example.children.values() for tensor in (*child.parameters(), *child.buffers())]
    return [tensor.dtype for tensor in (*example.parameters.values(), *below)]


def raised(doing: str, error: Exception) -> Refusal:
    """What somebody's code raised while this was *doing* something with it."""
    return Refusal(f"{type(error).__name__} while {doing}: {error}", kind="error")
