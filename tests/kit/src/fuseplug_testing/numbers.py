"""Checks of values and gradients: in every mix of dtypes, and at every edge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug_backends.triton.kernel import TritonKernel, interpreted
from fuseplug_verify import Example, Outcome

from .attempts import Raised, attempt
from .edges import MEMORY_LAYOUTS, UPSTREAM, arguments, planted, zeroed
from .edges import shapes as cut
from .results import Finding
from .subjects import Case
from .torch_private import tree_leaves
from .wrappers import within

_MANY = 1 << 12
"""Elements from which on a small bias can be told from roundings to half precision."""


def numbers(case: Case) -> Iterator[Finding]:
    """Numbers are right in every mix of dtypes and with the other training flag, and the kernel is really called."""
    module = case.subject.module
    for mix in case.proposal.mixes:
        before = case.compute.calls
        finding = case.compare(f"{mix}", case.example(mix))
        yield finding
        if not finding.fault and not finding.skipped:
            idle = "the kernel was not called: its adapter computes something itself"
            yield Finding(f"{mix}", fault="" if case.compute.calls > before else idle)
            if any(value.is_floating_point() and value.itemsize <= 2 for value in _tensors(case.example(mix))):
                yield case.compare(f"{mix}, {_MANY} elements", case.example(mix, size=_MANY))
    if module is not None:
        flag = not module.training
        yield case.compare("in training" if flag else "in evaluation", case.example(), training=flag)


def sizes(case: Case) -> Iterator[Finding]:
    """Numbers are right at each size that the kernel names.

    On the first specimen of a variant, they are also right far beyond these sizes, and at odd sizes.
    """
    for size in case.sizes:
        yield from _at(case, [case.example(size=size, number=number) for number in range(2)])
    if not case.first_of_variant or case.examined.depth == "quick":
        return
    if interpreted() and isinstance(case.examined.sound, TritonKernel):
        yield Finding("far beyond", skipped="Triton's interpreter would take minutes")
        return
    example = case.example(size=case.beyond)
    yield from _at(case, [example, _odd(case, example)], times=case.beyond / max(case.sizes))


def _at(case: Case, examples: list[Example], times: float = 1.0) -> Iterator[Finding]:
    # Both run before either is judged, so that no stale result passes.
    where = f"{examples[0].args[0].numel()} elements"
    found = attempt(lambda: [case.kernel_on(example) for example in examples])
    if isinstance(found, Raised):
        yield Finding(where, fault=f"raises {found}")
        return
    for example, outcome in zip(examples, found, strict=True):
        expected, truth = case.original_on(example), case.truth_on(example)
        yield Finding(where, fault=case.excess(outcome, expected, truth, times=times))


def _odd(case: Case, example: Example) -> Example:
    """*example*, cut to an odd size along its longest dimension but the last; unchanged if that is not possible."""
    longest = max(example.args[0].shape[:-1], default=0)
    for what, dims, new, ways in cut(example):
        if " odd " in what and example.args[0].shape[dims[0]] == longest:
            return next((way for way in ways if _runs(case, way, dims, new)), example)
    return example


def shapes(case: Case) -> Iterator[Finding]:
    """Numbers are right for zero, one and an odd number of everything but features."""
    for size in case.edge_sizes:
        example = case.example(size=size)
        for what, dims, new, ways in cut(example):
            way = next((way for way in ways if _runs(case, way, dims, new)), None)
            where = f"{what}, {_shape(example)}"
            if way is None:
                yield Finding(where, skipped="the original raises here, or this dimension is elsewhere in its result")
            else:
                yield case.compare(where, way)


def layouts(case: Case) -> Iterator[Finding]:
    """Numbers are right for arguments in any memory layout, with NaN between their elements."""
    for size in case.edge_sizes:
        for name, layout in MEMORY_LAYOUTS.items():
            yield case.compare(f"{name}, {size} elements", case.example(size=size), arguments=layout)


def gradients(case: Case) -> Iterator[Finding]:
    """Gradients are right for any memory layout of the gradient from above, and if only one gradient is wanted."""
    if not case.gradients:
        yield Finding("", skipped="it says that it has no gradient")
        return
    for size in case.edge_sizes:
        example = case.example(size=size)
        usual = case.truth_on(example)
        for name, layout in UPSTREAM.items():
            yield case.compare(f"from above {name}, {size} elements", example, upstream=layout, usual=usual)
        names = _differentiable(case.original_on(example))
        for wanted in names if len(names) > 1 else ():
            yield case.compare(f"of {wanted} alone, {size} elements", example, wants=wanted.__eq__)


def no_grad(case: Case) -> Iterator[Finding]:
    """Under ``no_grad`` and ``inference_mode``, results have the same bits and keep them, and nothing is recorded."""
    for size in case.repeated_sizes:
        example = case.example(size=size)
        # The kernel may compute the model's next steps on a lazy result in another way when gradients are recorded.
        alone = replace(example, after=None)
        with_gradients = _outputs(case.kernel_on(alone))
        for context in (torch.no_grad, torch.inference_mode):
            where, inside = f"{context.__name__}, {size} elements", within(context)
            finding = case.compare(where, example, around=inside)
            yield finding
            if not finding.fault and not finding.skipped:
                found = _outputs(case.kernel_on(alone, around=inside))
                same = all(
                    torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, with_gradients, strict=True)
                )
                yield Finding(
                    where, fault="" if same else "its values are not those it gives when gradients are recorded"
                )
                kept = [value.clone() for value in found]
                case.kernel_on(replace(case.example(size=size, number=1), after=None), around=inside)
                stay = all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, kept, strict=True))
                yield Finding(where, fault="" if stay else "its result changes when it is called again")


def double_backward(case: Case) -> Iterator[Finding]:
    """Differentiated twice, the kernel is right, or it raises an error."""
    if not case.gradients:
        yield Finding("", skipped="it says that it has no gradient")
        return
    example = next((each for each in map(case.example, case.proposal.mixes) if _is_float32(each)), None)
    if example is None:
        yield Finding("", skipped="none of its mixes is float32 only")
        return
    expected = attempt(lambda: case.kernel_on(example, case.original, _differentiated))
    if isinstance(expected, Raised):
        yield expected.by_the_original("")
        return
    truth = case.kernel_on(example, case.reference, _differentiated, device="cpu", dtype=torch.float64)
    found = attempt(lambda: case.kernel_on(example, None, _differentiated))
    if isinstance(found, Raised):
        yield Finding("", skipped=f"it raises {found}, as a kernel without a second derivative should")
        return
    # Nobody states a tolerance for second derivatives, and one that is wrong is wrong by far more than a few percent.
    why = case.excess(found, expected, truth, coarsest=torch.bfloat16)
    remedy = "if differentiated_again(), return vjp() from the backward: both are in fuseplug_backends.differentiating"
    yield Finding("", fault=f"a gradient of a gradient is wrong, and nothing says so: {why}; {remedy}" if why else "")


def _differentiated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns the gradients of what *function* returns, such that they can be differentiated again."""

    def call(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        outputs = [each for each in tree_leaves(function(*args, **kwargs)) if isinstance(each, Tensor)]
        outputs = [output for output in outputs if output.requires_grad]
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        for module in (each for each in args if isinstance(each, nn.Module)):
            leaves += module.parameters()
        leaves = [leaf for leaf in leaves if leaf.requires_grad]
        # Quarters of small integers are exact in every dtype.
        grads = [(torch.arange(y.numel(), device=y.device) % 7 - 3).view(y.shape).to(y.dtype) / 4 for y in outputs]
        found = torch.autograd.grad(outputs, leaves, grads, create_graph=True, allow_unused=True)
        return tuple(torch.zeros(()) if gradient is None else gradient for gradient in found)

    return call


def _is_float32(example: Example) -> bool:
    values = (*_tensors(example), *example.parameters.values())
    return all(value.dtype is torch.float32 for value in values if value.is_floating_point())


def special_values(case: Case) -> Iterator[Finding]:
    """A NaN or infinity shows up in the result where it does in the original's, and nowhere else; zeros work."""
    for size in case.edge_sizes:
        example = case.example(size=size)
        yield case.compare(f"zeros, {size} elements", zeroed(example))
        for which in range(len(arguments(example))):
            for name, value in (("NaN", math.nan), ("inf", math.inf), ("-inf", -math.inf)):
                if (with_value := planted(example, which, value)) is not None:
                    yield from _where_it_goes(case, f"{name} in args[{which}], {size} elements", with_value)


def _where_it_goes(case: Case, where: str, example: Example) -> Iterator[Finding]:
    # Values only: in gradients, two formulas of one function may meet inf - inf in different places.
    example, recorded = case.values_only(example)
    finding = case.compare(where, example, gradients=recorded)
    yield finding
    if finding.fault or finding.skipped:
        return
    found, expected = (_outputs(of(example, gradients=recorded)) for of in (case.kernel_on, case.original_on))
    pairs = zip(found, expected, strict=True)
    lost = any(not torch.equal(a.isfinite(), b.isfinite()) for a, b in pairs if a.is_floating_point())
    yield Finding(where, fault="it is not where the original has it in the result" if lost else "")


def _runs(case: Case, example: Example, dims: Sequence[int], new: int) -> bool:
    outcome = attempt(lambda: case.original_on(example))
    if isinstance(outcome, Raised):
        outcome.by_the_original("")  # raises if the error is the kit's
        return False
    outputs = _outputs(outcome)
    rank = example.args[0].dim()
    return bool(outputs) and (outputs[0].dim() != rank or all(outputs[0].shape[dim] == new for dim in dims))


def _tensors(example: Example) -> list[Tensor]:
    return [value for value in arguments(example) if isinstance(value, Tensor)]


def _outputs(outcome: Outcome) -> list[Tensor]:
    return [value for name, value in outcome.values.items() if name.startswith("output") and value is not None]


def _differentiable(outcome: Outcome) -> list[str]:
    return [
        name.removeprefix("gradient of ")
        for name, value in outcome.values.items()
        if name.startswith("gradient of ") and value is not None
    ]


def _shape(example: Example) -> str:
    return "×".join(map(str, example.args[0].shape))
