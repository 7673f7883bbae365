"""Is a lazy result what it stands for, before and after it is computed?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .attempts import Raised, attempt, foreign
from .results import Finding
from .subjects import Case
from .wrappers import Around, followed_by, within


def lazy(case: Case) -> Iterator[Finding]:
    """A lazy result has the original's shape, strides, dtype and device, and becomes its result bit for bit.

    This holds in every mix, under autocast, and after what the model goes on to do was computed without the result.
    """
    if case.proposal.lazy is None:
        yield Finding("", skipped="its result is never lazy")
        return
    if not case.gradients:
        yield Finding("", skipped="it says that it has no gradient, and a result can be lazy only with one")
        return
    for mix in case.proposal.mixes:
        autocast = within(lambda: torch.autocast(case.device.type, torch.bfloat16))
        for name, inside in ((f"{mix}", _plain), (f"{mix} under autocast", autocast)):
            yield _becomes(case, name, mix, inside)


def _becomes(case: Case, where: str, mix: Any, inside: Around) -> Finding:
    example = case.example(mix)
    alone = replace(example, after=None)
    looks: list[str] = []

    def looked_at(result: Any) -> Any:
        looks.append(_looks(result))
        return result

    def computed(result: Any) -> Any:
        looked_at(result)
        if example.after is not None:
            example.after(result)
        return foreign(result.computed)() if hasattr(type(result), "computed") else result

    expected = attempt(lambda: case.kernel_on(alone, followed_by(case.original, looked_at), inside))
    if isinstance(expected, Raised):
        return expected.by_the_original(where)
    found = attempt(lambda: case.kernel_on(alone, followed_by(case.fused, computed), inside))
    if isinstance(found, Raised):
        return found.by_the_kernel(where)
    theirs, ours = looks
    if ours != theirs:
        return Finding(where, fault=f"stands for {ours}, and the original's is {theirs}")
    why = found.difference(expected)
    return Finding(where, fault=why and f"becomes something else: {why}")


def _looks(tensor: Tensor) -> str:
    """Everything about a tensor except its values, in words."""
    kind = str(tensor.dtype).removeprefix("torch.")
    gradient = "with a gradient" if tensor.requires_grad else "without one"
    return f"{kind}{list(tensor.shape)} of strides {tuple(tensor.stride())} on {tensor.device}, {gradient}"


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
