"""Checks of everything but the numbers in results: types, devices, memory layouts and containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuseplug_verify import Example, Outcome

from .attempts import Raised, attempt
from .edges import MEMORY_LAYOUTS, arguments
from .results import Finding
from .subjects import Case
from .torch_private import tree_leaves
from .wrappers import followed_by, within

_CONTIGUOUS = "contiguous"
_AS_THEY_ARE = "as they are"
_SWAPPED = "second and third dimension swapped"


def _swapped(tensor: Tensor) -> Tensor:
    """*tensor* in the layout of heads after ``view(...).transpose(1, 2)``, which are then normalised or rotated."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2) if tensor.dim() > 3 else _second_last(tensor)


def _second_last(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).contiguous().transpose(0, 1) if tensor.dim() > 2 else tensor.clone()


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


HANDED: dict[str, Callable[[Tensor], Tensor]] = {
    _CONTIGUOUS: _contiguous,
    _AS_THEY_ARE: Tensor.clone,
    _SWAPPED: _swapped,
    **MEMORY_LAYOUTS,
}


def returned(case: Case) -> Iterator[Finding]:
    """Results have the types and devices of the original's results, and come in the same containers.

    For contiguous inputs, they also have the strides of the original's results, because a caller may ``view`` them.
    """
    given = arguments(case.example())
    contiguous = all(value.is_contiguous() for value in given if isinstance(value, Tensor))
    for name, layout in HANDED.items():
        if contiguous and name == _AS_THEY_ARE:
            continue
        for gradients in dict.fromkeys((case.gradients, False)):
            where = name if gradients else f"{name}, without gradients"
            yield _compared(case, where, strides=name == _CONTIGUOUS, arguments=layout, gradients=gradients)


def _compared(case: Case, where: str, *, strides: bool, **how: Any) -> Finding:
    expected = attempt(lambda: _result(case, case.original, **how))
    if isinstance(expected, Raised):
        return expected.by_the_original(where)
    found = attempt(lambda: _result(case, case.fused, **how))
    if isinstance(found, Raised):
        return found.by_the_kernel(where)
    fault = _otherwise(found[0], expected[0], case.proposal.lazy)
    return Finding(where, fault=fault or (found[1].lies_otherwise(expected[1]) if strides else ""))


def _result(case: Case, function: Callable[..., Any], **how: Any) -> tuple[Any, Outcome]:
    """The result of *function* itself; and the outcome, which keeps only the numbers of that result."""
    kept = []

    def keep(result: Any) -> Any:
        kept.append(result)
        return result

    outcome = case.kernel_on(replace(case.example(), after=None), function=followed_by(function, keep), **how)
    return kept[-1], outcome


def _otherwise(found: Any, expected: Any, lazy: type[Any] | None) -> str:
    """The first difference in type, device or containers between two results; ``""`` if there is none.

    A tensor of the class *lazy* may stand for a plain one.
    """
    if (ours := _containers(found)) != (theirs := _containers(expected)):
        return f"returns {ours} instead of {theirs}"
    pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
    for number, (one, other) in enumerate(pairs):
        if not isinstance(other, Tensor):
            continue
        name = f"output[{number}]"
        if type(one) is not type(other) and not (type(other) is Tensor and lazy is not None and type(one) is lazy):
            return f"{name} is a {type(one).__qualname__} instead of a {type(other).__qualname__}"
        if one.device != other.device:
            return f"{name} is on {one.device} instead of {other.device}"
    return ""


def _containers(value: Any) -> str:
    """The containers of a result and their contents, in words; tensors of every type look the same."""
    if isinstance(value, Tensor):
        return "a Tensor"
    if type(value) in (tuple, list) or hasattr(value, "_fields"):
        return f"{type(value).__name__}({', '.join(map(_containers, value))})"
    if isinstance(value, dict):
        return f"{type(value).__name__}({', '.join(f'{key}: {_containers(each)}' for key, each in value.items())})"
    return "None" if value is None else type(value).__name__


def default_device(case: Case) -> Iterator[Finding]:
    """While another default device is set, the kernel computes the same, on the device of its arguments.

    Tensors made without ``device=`` are on the default device, such as an index made by ``torch.arange(n)``.
    """
    for size in case.edge_sizes:
        example = case.example(size=size)
        where = f"torch.set_default_device('meta'), {size} elements"
        usual, truth = case.original_on(example), case.truth_on(example)
        yield _on_meta(case, where, example, usual, truth)


def _on_meta(case: Case, where: str, example: Example, usual: Outcome, truth: Outcome) -> Finding:
    around = within(lambda: torch.device("meta"))
    expected = attempt(lambda: case.kernel_on(example, case.original, around))
    if isinstance(expected, Raised):
        return expected.by_the_original(where)
    if lost := _lost(expected, usual):
        return Finding(where, skipped=f"the original raises here ({lost})")
    found = attempt(lambda: case.kernel_on(example, around=around))
    if isinstance(found, Raised):
        return found.by_the_kernel(where)
    return Finding(where, fault=_lost(found, usual) or case.excess(found, usual, truth))


def _lost(found: Outcome, usual: Outcome) -> str:
    """The first value that is on another device than usual, in words; ``""`` if there is none."""
    for name, value in found.values.items():
        other = usual.values.get(name)
        if value is not None and other is not None and value.device != other.device:
            return f"{name} is on {value.device} instead of {other.device}"
    return ""
