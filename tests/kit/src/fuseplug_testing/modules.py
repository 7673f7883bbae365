"""Checks of a fused module: applied and undone, copied, pickled, compiled, checkpointed, written into, cast."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import pickle
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuseplug.patching import our_marks
from fuseplug_verify import Example, neutral

from . import torch_private
from .attempts import Raised, attempt, foreign, raised
from .edges import with_each
from .importing.process_state import ProcessState
from .results import Finding
from .subjects import Case, Specimen, by_the_original, given_back
from .torch_private import tree_map
from .whole import inputs_of, manager_of, options_for, placed
from .wrappers import Around, followed_by, within

_serial = itertools.count()


def undo(specimen: Specimen) -> Iterator[Finding]:
    """A manager fuses the module; ``undo`` restores it, to the last attribute; nothing else changes."""
    examined = specimen.examined
    module, other = (copy.deepcopy(specimen.module).to(examined.device) for _ in range(2))
    before, untouched = _held_by(module), _held_by(other)
    owners = {type(part) for part in module.modules()}
    process = ProcessState([owner for owner in owners if not owner.__module__.startswith("torch.")])
    applied = manager_of(examined).apply_all(module, **options_for(specimen))
    fused = [path for path, part in module.named_modules() if our_marks(part)]
    yield Finding("apply_all", fault="" if fused else f"nothing is fused: {applied.report}")
    yield Finding("apply_all", fault="; ".join(process.changed()))
    yield Finding("another instance", fault=_otherwise(untouched, _held_by(other)))
    for case in specimen.cases:
        if case.scope is None:
            yield from _runs_in_place(case, module)
    if (inputs := inputs_of(specimen)) is not None:
        with torch.set_grad_enabled(examined.sound.differentiable):
            module(**placed(inputs, module))
        yield Finding("its own call")
    applied.undo()
    yield Finding("undo", fault=_otherwise(before, _held_by(module)))
    alive = weakref.ref(module)
    del module, before
    if alive() is not None:
        gc.collect()
    yield Finding("undo", fault="the module is kept alive by something" if alive() is not None else "")


def copies(case: Case) -> Iterator[Finding]:
    """A deep copy is fused and computes with its own weights; a pickle comes back as the original."""
    if case.subject.module is None:
        yield Finding("", skipped="the kernel replaces a function, which has no weights to copy")
        return

    def own(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _method(module, case)(*args, **kwargs)

    example, recorded = case.values_only(case.example())
    how: dict[str, Any] = {"function": own, "gradients": recorded, "around_original": False}
    yield case.compare("deepcopy", example, around=functools.partial(_in_a_copy, case), **how)
    try:
        pickle.dumps(case.double())
    except Exception as error:  # noqa: BLE001 - whatever a third party's class does
        yield Finding("pickle", skipped=f"the original cannot be pickled ({raised(error)})")
        return
    yield case.compare("pickle", example, around=functools.partial(_in_a_pickle, case), **how)


def _in_a_copy(case: Case, call: Callable[..., Any]) -> Callable[..., Any]:
    def copied(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _used(case, module, *args, **kwargs)
        duplicate = foreign(copy.deepcopy)(module)
        foreign(_must_be)(our_marks(duplicate), "the copy is not fused")
        with spoilt(module):
            return call(duplicate, *args, **kwargs)

    return copied


def _in_a_pickle(case: Case, call: Callable[..., Any]) -> Callable[..., Any]:
    def pickled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _used(case, module, *args, **kwargs)
        loaded = foreign(pickle.loads)(foreign(pickle.dumps)(module))
        foreign(_must_be)(not our_marks(loaded), "it comes back fused: a process without the kernel could not load it")
        return call(loaded, *args, **kwargs)

    return pickled


def _must_be(holds: object, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


def _used(case: Case, module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Fuse *module* and call it, so that a copy includes whatever the kernel keeps on it."""
    case.fuse(module)
    with neutral(case.examined.device_type, dtype=None, random_kept=True), torch.set_grad_enabled(case.gradients):
        _method(module, case)(*args, **kwargs)


def compiled(case: Case) -> Iterator[Finding]:
    """Inside ``torch.compile``, the kernel is right and breaks no graph.

    The backend is ``aot_eager``, which traces forward and backward but generates no code: that is Inductor's part.
    """
    if case.gradients and torch_private.MISCOMPILES_FUNCTIONS:
        yield Finding("", skipped=f"torch {torch.__version__} loses gradients, so compiled calls are the original's")
        return
    function = foreign(torch.compile(of_its_own(case.guarded_in_scope), fullgraph=True, backend="aot_eager"))
    where = "torch.compile(fullgraph=True)"
    example = case.example()
    finding = case.compare(where, example, function=function)
    if not finding.fault and not finding.skipped:
        # A compiled program does not count who computes. The guard compares the same things outside of it.
        with given_back() as reasons:
            case.kernel_on(example, case.guarded_in_scope)
        finding = finding._replace(skipped=by_the_original(reasons))
    if finding.fault and not _compiles(case.original, case, example):
        finding = Finding(where, skipped="the original cannot be compiled as one graph")
    yield finding


def checkpointed(case: Case) -> Iterator[Finding]:
    """Gradients are right under activation checkpointing."""
    if not case.gradients:
        yield Finding("", skipped="it says that it has no gradient")
        return

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: checkpoint(function, *args, use_reentrant=False, **kwargs)

    yield case.compare("", case.example(), function=case.guarded, around=again, around_original=False)


def written_into(case: Case) -> Iterator[Finding]:
    """A caller may write into the kernel's result, as into the original's."""

    def written(result: Any) -> Any:
        return tree_map(
            lambda value: foreign(value.mul_)(1) if isinstance(value, Tensor) and value.is_floating_point() else value,
            result,
        )

    ours, theirs = followed_by(case.guarded, written), followed_by(case.original, written)
    for size in case.sizes:
        yield case.compare(f"{size} elements", case.example(size=size), function=ours, original=theirs)


def autocast(case: Case) -> Iterator[Finding]:
    """Under autocast, the result has the original's dtype and is as exact."""
    half = torch.bfloat16
    inside = within(lambda: torch.autocast(case.device.type, half))
    how: dict[str, Any] = {"function": case.guarded, "around": inside}
    for mix in case.proposal.mixes:
        example = case.example(mix)
        # If autocast does not change the original, no coarser dtype takes part, and the kernel gets no wider tolerance.
        coarsest = half if _differs(case, inside, example) else None
        yield case.compare(f"{mix}", example, coarsest=coarsest, **how)
    for size in case.edge_sizes[1:]:
        example = case.example(size=size)
        yield case.compare(f"{size} elements", example, coarsest=half, **how)


def _differs(case: Case, around: Around, example: Example) -> bool:
    """Whether *around* changes the original's results, bit for bit."""
    inside = attempt(lambda: case.kernel_on(example, case.original, around))
    outside = attempt(lambda: case.original_on(example))  # some mixes of dtypes run only under autocast
    return isinstance(inside, Raised) or isinstance(outside, Raised) or bool(inside.difference(outside))


def casts(case: Case) -> Iterator[Finding]:
    """A fused module that is later cast to another dtype computes what the original does after the same cast."""
    if case.subject.module is None:
        yield Finding("", skipped="the kernel replaces a function, which is not cast")
        return
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        original = functools.partial(_cast_between, case, dtype)

        def fused(module: nn.Module, *args: Any, then: Callable[..., Any] = original, **kwargs: Any) -> Any:
            case.fuse(module)
            return then(module, *args, **kwargs)

        name = str(dtype).removeprefix("torch.")
        example, recorded = case.values_only(case.example())
        yield case.compare(f"to {name}", example, function=fused, original=original, gradients=recorded)


def _cast_between(case: Case, dtype: torch.dtype, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Call the method of *module*, cast it, and call it again."""
    _method(module, case)(*args, **kwargs)
    foreign(module.to)(dtype)
    args, kwargs = _cast((args, kwargs), dtype)
    return _method(module, case)(*args, **kwargs)


def _runs_in_place(case: Case, module: nn.Module) -> Iterator[Finding]:
    part = module.get_submodule(case.place.paths[0])
    example = case.example()
    arguments = with_each(example, lambda value: value.to(case.device) if isinstance(value, Tensor) else value)
    plain = copy.deepcopy(case.place.module).to(case.device)
    with torch.no_grad():
        usual = attempt(lambda: _method(plain, case)(*arguments.args, **arguments.kwargs))
    if isinstance(usual, Raised):  # only a whole specimen that takes an example's arguments can be run
        finding = usual.by_the_original(case.label)
        if case.proposal.target.function is not None:
            finding = Finding(case.label, skipped="its method takes other arguments than the function that is replaced")
        yield finding
        return
    with torch.set_grad_enabled(case.gradients), given_back() as reasons:
        _method(part, case)(*arguments.args, **arguments.kwargs)
    yield Finding(case.label, skipped=by_the_original(reasons))


def _held_by(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    registries = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
    return [
        (f"{path}.{name}".strip("."), dict(part.__dict__[name] if name else part.__dict__))
        for path, part in module.named_modules()
        for name in ("", *registries)
    ]


def _otherwise(before: list[tuple[str, dict[str, Any]]], after: list[tuple[str, dict[str, Any]]]) -> str:
    for (path, held), (_, now) in zip(before, after, strict=False):
        if list(held) != list(now) or any(held[name] is not now[name] for name in held):
            names = [name for name in {**held, **now} if held.get(name) is not now.get(name)]
            return f"{path or 'the module'} has other values for {', '.join(names) or 'its attributes, reordered'}"
    return "" if len(before) == len(after) else "it has other modules"


def _method(module: nn.Module, case: Case) -> Callable[..., Any]:
    return foreign(getattr(module, case.proposal.target.method))


@contextlib.contextmanager
def spoilt(module: nn.Module) -> Iterator[None]:
    """Inside, the weights of *module* are NaN, so that it shows if something still reads them."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point() and not t.is_meta]
    kept = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        for t in tensors:
            t.fill_(float("nan"))
    try:
        yield
    finally:
        with torch.no_grad():
            for t, value in zip(tensors, kept, strict=True):
                t.copy_(value)


def of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """*function* behind a code object of its own, because Dynamo counts compilations by code object."""

    def outer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    code = outer.__code__.replace(co_name=f"checked_{next(_serial)}")
    return types.FunctionType(code, outer.__globals__, code.co_name, closure=outer.__closure__)


def _compiles(function: Callable[..., Any], case: Case, example: Example) -> bool:
    whole = foreign(torch.compile(of_its_own(function), fullgraph=True, backend="aot_eager"))
    finding = case.compare("", example, function=whole)
    return not finding.fault and not finding.skipped


def _cast(values: Any, dtype: torch.dtype) -> Any:
    def convert(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return tree_map(convert, values)
