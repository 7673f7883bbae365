"""Does the kernel compute a specimen that is called as it is meant to be called, and is the result right?

The other checks run a target by itself. What a model does around it shows only here: whether the calls are in the
scope, and whether a lazy result is followed through what this model does with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseplug.contract import Scope
from fuseplug.patching import class_method
from fuseplug.patching.counting import Calls
from fuseplug.patching.placing import Binding
from fuseplug_verify import Tolerance

from .attempts import Raised, attempt, foreign, raised
from .modules import of_its_own, spoilt
from .results import Finding
from .subjects import Specimen
from .whole import Inputs, Prepare, Whole, inputs_of

_HALF = torch.bfloat16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def own_calls(specimen: Specimen) -> Iterator[Finding]:
    """The kernel computes the specimen's own call, and does it right: in all dtypes, copied, compiled, checkpointed."""
    scopes = [(place, proposal.scope) for place, answer in specimen.answers for proposal in answer.proposals]
    own = [scope for place, scope in scopes if scope is not None and "" in place.paths]
    inputs = inputs_of(specimen)
    if inputs is None:
        if all(scope is None for _, scope in scopes):
            yield Finding("", skipped="it has no dummy_inputs, so nothing says how it is called")
        else:
            lacking = "the kernel has a scope, and nothing says how the specimen is called within it"
            yield Finding("", fault=f"{lacking}: give it a property dummy_inputs, the arguments of a call by name")
        return
    for scope in own:
        if why := _outside(specimen.module, scope, inputs):
            yield Finding("", fault=why)
            return
    method = own[0].method if own else "forward"
    name = f"{method}({', '.join(inputs)})"
    whole = Whole(specimen, inputs, method)
    yield _compared(specimen, whole, name)
    for calls in whole.calls:
        yield _computed(name, calls)
    yield from (_compared(specimen, whole, f"{name}, {where}", **how) for where, how in _situations(specimen, whole))


def _outside(module: nn.Module, scope: Scope, inputs: Inputs) -> str:
    """Why the call of *module* with *inputs* is not in *scope*; ``""`` if it is."""
    method = class_method(module, scope.method)
    if method is None:
        return f"its scope is of {scope.method}, and that is no method of it"
    bound = Binding(method)((module,), inputs)
    if bound is None:
        return f"{scope.method} does not take {', '.join(inputs)}, which the specimen names in dummy_inputs"
    try:
        holds = scope.holds(module, {**bound[0], **bound[1]})
    except Exception as error:  # noqa: BLE001 - what a scope asks may raise anything
        return f"its scope raises {raised(error)}, so that the originals compute: look a name up that the call has"
    if holds:
        return ""
    return (
        f"its scope does not hold during {scope.method}({', '.join(inputs)}), the call that the specimen names in "
        "dummy_inputs: the kernel would never run"
    )


def _computed(name: str, calls: Calls) -> Finding:
    """The finding on who computed a target during the call."""
    where = f"{name}: {calls.paths[0] or 'the specimen'}.{calls.target}"
    if calls.original or not calls.fused:
        return Finding(where, fault=f"the kernel does not compute it: {calls}")
    if calls.made_real:
        return Finding(where, skipped=f"its lazy result is computed after all, for {', '.join(calls.made_real)}")
    return Finding(where)


def _situations(specimen: Specimen, whole: Whole) -> Iterator[tuple[str, dict[str, Any]]]:
    """The other circumstances of the call, each with its name and the arguments for `_compared`."""
    flag = not specimen.module.training
    yield "in training" if flag else "in evaluation", {"training": flag}
    for dtype in _DTYPES:
        yield f"cast to {str(dtype).removeprefix('torch.')}", {"dtype": dtype}
    for name, prepare in _ways(specimen, whole).items():
        yield name, {"prepare": prepare, "coarsest": _HALF if name == "under autocast" else None}


def _ways(specimen: Specimen, whole: Whole) -> dict[str, Prepare]:
    kind = specimen.examined.device_type

    def under_autocast(module: nn.Module) -> Callable[..., Any]:
        def call(**inputs: Any) -> Any:
            with torch.autocast(kind, _HALF):
                return whole.method_of(module)(**inputs)

        return call

    def copied(module: nn.Module) -> Callable[..., Any]:
        duplicate = foreign(copy.deepcopy)(module)

        def call(**inputs: Any) -> Any:
            with spoilt(module):
                return whole.method_of(duplicate)(**inputs)

        return call

    def checkpointed(module: nn.Module) -> Callable[..., Any]:
        return lambda **inputs: checkpoint(whole.method_of(module), use_reentrant=False, **inputs)

    def compiled(module: nn.Module) -> Callable[..., Any]:
        return foreign(torch.compile(of_its_own(whole.method_of(module)), fullgraph=True, backend="aot_eager"))

    return {
        "under autocast": under_autocast,
        "of a deep copy": copied,
        "checkpointed": checkpointed,
        "compiled": compiled,
    }


def _compared(
    specimen: Specimen, whole: Whole, where: str, *, coarsest: torch.dtype | None = None, **how: Any
) -> Finding:
    """Compare the fused specimen with the unfused one, and both with the unfused one in float64."""
    expected = attempt(lambda: whole.run(**how))
    if isinstance(expected, Raised):
        return expected.by_the_original(where)
    truth = whole.run(**{**how, "dtype": torch.float64, "device": "cpu", "prepare": None})
    patches = whole.patches
    found = attempt(lambda: whole.run(patches, **how))
    if isinstance(found, Raised):
        return found.by_the_kernel(where)
    coarsest = coarsest or how.get("dtype") or _coarsest(specimen.module)
    return Finding(where, fault=_tolerance(specimen, coarsest).excess(found, expected, truth))


def _coarsest(module: nn.Module) -> torch.dtype:
    """The dtype of *module* with the largest roundings: a loss in float32 is made of logits in this dtype."""
    dtypes = {each.dtype for each in module.parameters() if each.is_floating_point()} or {torch.float32}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _tolerance(specimen: Specimen, coarsest: torch.dtype) -> Tolerance:
    """The tolerance of the least exact target of *specimen*, because the errors of all targets meet in one result."""
    stated = [Tolerance.of(case.semantics.candidate) for case in specimen.cases]
    return Tolerance(
        max(each.roundings for each in stated), max(each.working_roundings for each in stated), False, coarsest
    )
