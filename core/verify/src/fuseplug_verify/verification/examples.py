"""The mixes in which a candidate's kernel is run, and the refusal if somebody's code raises."""

from __future__ import annotations

from typing import Any

import torch

from ..data import Candidate, Example, Refusal


def mixes_run(candidate: Candidate) -> tuple[Any, ...]:
    """The mixes of *candidate* in which a kernel is run on its device: the first, and the likely ones.

    Unless the candidate names the likely ones, they are all mixes in which the module's own tensors have their present
    dtypes: the caller or autocast chooses the rest of a mix.

    Raises:
        TypeError: As in `Candidate.example_of`.
    """
    now, *others = candidate.mixes
    if candidate.likely is not None:
        return (now, *candidate.likely)
    dtypes = _own_dtypes(candidate.example_of(now, 1))
    return (now, *(mix for mix in others if _own_dtypes(candidate.example_of(mix, 1)) == dtypes))


def _own_dtypes(example: Example) -> list[torch.dtype]:
    below = [tensor for child in example.children.values() for tensor in (*child.parameters(), *child.buffers())]
    return [tensor.dtype for tensor in (*example.parameters.values(), *below)]


def raised(doing: str, error: Exception) -> Refusal:
    """The refusal for an *error* of somebody's code; *doing* says in words what was going on."""
    return Refusal(f"{type(error).__name__} while {doing}: {error}", kind="error")
