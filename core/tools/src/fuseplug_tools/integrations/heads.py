"""Serves heads that trainers put on models: forwards of an instance, which look up a function of an op.

TRL's trainers put such a head on a model. It never calls the module ``lm_head``, and its function is an
`torch.autograd.Function`. Core replaces methods of classes and plain functions that these look up, and reads what they
compute; so neither serves here. The head's own forward stays. The instance gets a copy of it, in which the name of the
function means a `Head`.

What computes the function comes from a distribution with an entry point of the group ``fuseplug.heads``. It is asked
``offer(space, name, device_type, kernels, every_size=...)``: the globals in which the forward finds the function, its
name there, where the model is, and the kernels that take part. It answers ``None`` for a function of another kind, or
why it offers nothing, or an object that has ``kernel_id`` and two methods, each for the arguments of a call:
``why_not(arguments)`` gives ``None`` if the kernel is to compute it, ``""`` if it is too small to gain, or another
reason; ``compute(arguments)`` computes it.
"""

from __future__ import annotations

import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import importlib_metadata
import torch
from torch import nn

from fuseplug.configuration import SETTINGS, environment
from fuseplug.contract import Target
from fuseplug.discovery.selecting import names_in, select
from fuseplug.fallback import this_thread
from fuseplug.kernel_manager import KernelManager
from fuseplug.patching.counting import Calls
from fuseplug.patching.hooked import name_of
from fuseplug.patching.tally import DECLINED, ENOUGH, Count
from fuseplug.patching.wrappers import Held, reached
from fuseplug.report.ranks import rank
from fuseplug_verify import called_functions, rebound

__all__ = ["Head", "serve"]

_PUT_BY = "_fuseplug_put_by"
_logger = logging.getLogger("fuseplug")


class Head:
    """A forward that somebody put on a module, and what computes the function that it looks up.

    Attributes:
        path: Where the module is.
        name: Under which name the forward looks the function up.
        kernel_id: The kernel; ``""`` if the head is left alone.
        why_not: Why it is left alone; ``""`` if it is not.
        counter: The calls that the kernel computed, and those that the function did, with the reasons.
    """

    def __init__(self, path: str, name: str, function: types.FunctionType, offered: Any) -> None:
        self.path, self.name, self.counter = path, name, Count()
        self.why_not = offered if isinstance(offered, str) else ""
        self.kernel_id: str = getattr(offered, "kernel_id", "")
        self._offered, self._what = offered, name_of(function)
        self._space, self._function = function.__globals__, function.__globals__[name]
        self._module: Callable[[], nn.Module | None] = lambda: None

    def __str__(self) -> str:
        by = f"is computed by {self.kernel_id}" if self.kernel_id else f"is left alone: {self.why_not}"
        return f"{self._what} is the forward of {self.path or 'the model'}, and its {self.name} {by}"

    def calls(self) -> Calls:
        """How many calls the kernel computed, how many the function did, and why."""
        count, target = self.counter, Target(function=self.name)
        return Calls((self.path,), target, self.kernel_id, count.fused, count.original, {}, tuple(count.reasons))

    def apply(self, *arguments: Any) -> Any:
        """What the function's ``apply`` computes. The copy of the forward calls it."""
        current = self._space[self.name]
        if torch.compiler.is_compiling() or self._module() is None:
            return current.apply(*arguments)
        why = self._offered.why_not(arguments) if current is self._function else f"another {self.name} is there now"
        this_thread.declined = False
        result = self._offered.compute(arguments) if why is None else current.apply(*arguments)
        self._count(DECLINED if this_thread.declined else why)
        this_thread.declined = False
        return result

    def undo(self) -> None:
        """Put back the very objects that were there. What somebody else holds calls the function itself from now on."""
        module, self._module = self._module(), lambda: None
        for place in () if module is None else _places(module, lambda value: _put_by(value)[0] is self):
            place.put(_put_by(place.value)[1])  # type: ignore[misc]

    def put_on(self, module: nn.Module, function: types.FunctionType) -> Head:
        """Have what the instance *module* holds of *function* call `apply`."""
        copy, self._module = rebound(function, {self.name: self}), weakref.ref(module)  # type: ignore[dict-item]
        # In the copy, which goes with the module: this lives as long as the copy, and would keep the module alive.
        setattr(copy, _PUT_BY, {})
        for place in _places(module, lambda value: _function(value) is function):
            after = types.MethodType(copy, module) if type(place.value) is types.MethodType else copy
            getattr(copy, _PUT_BY)[id(after)] = self, place.value, after
            place.put(after)  # type: ignore[misc]  # a method that is no end is looked into, and has none
        return self

    def _count(self, why: str | None) -> None:
        """Count a call that the kernel computed, or *why* the function did; none that was too small has a reason."""
        count = self.counter
        count.fused += why is None
        count.original += why is not None
        if why:
            count.reasons[why] = None
            if count.original == ENOUGH and not count.fused and rank() == 0:
                _logger.warning("%s, but none of its first %d calls: %s", self, ENOUGH, "; ".join(count.reasons))


def serve(model: nn.Module, manager: KernelManager, **options: Any) -> list[Head]:
    """Serve the heads that somebody put on modules of *model*, and say which are left alone, and why.

    A head that is served already stays so. Each is told to ``logging.getLogger("fuseplug")``, and a warning comes if
    the function itself computes its first ten calls though they are large.

    Args:
        model: Its modules are looked through.
        manager: Whose kernels take part.
        **options: As `KernelManager.apply_all` takes them: ``include``, ``exclude``, ``device`` and ``every_size`` mean
            the same here. With ``only``, ``skip`` or ``rounding="exact"`` no head is served.
    """
    excluded = {*names_in(options.get("exclude", ()))}
    ready = select(manager.kernels(), options.get("include"), (), "training")
    kernels = [r.kernel for r in ready if r.kernel and excluded.isdisjoint((r.name, r.kernel_id, r.kernel.op))]
    every = environment().get(SETTINGS["every_size"].variable, "") not in ("", "0") or options.get("every_size", False)
    barring = (name for name in ("only", "skip", "rounding") if options.get(name) not in (None, (), "", "close"))
    barred = next((f"no head is served with {name}=" for name in barring), "")
    heads: list[Head] = []
    for path, module in model.named_modules():
        places = _places(module, lambda value: bool(_put_by(value)[0] or _looked_up(_function(value))), "forward")
        for value in [place.value for place in places]:
            head = _put_by(value)[0]
            if head is None:
                device = torch.device(options.get("device") or next(module.parameters()).device)
                head = _made(path, module, _function(value), barred, device.type, kernels, every_size=every)
                if head is None:
                    continue
                _logger.log(logging.DEBUG if rank() else logging.INFO, "%s", head)
            heads.append(head)
    return heads


def _made(path: str, module: nn.Module, function: Any, barred: str, *question: Any, **options: Any) -> Head | None:
    """A head with what the first distribution that knows the function says of it, and already put on."""
    name = _looked_up(function)
    for entry in importlib_metadata.entry_points(group="fuseplug.heads"):
        try:
            offered = entry.load()(function.__globals__, name, *question, **options)
            if offered is not None:
                head = Head(path, name, function, barred or offered)
                return head.put_on(module, function) if head.kernel_id else head
        except Exception as error:  # noqa: BLE001 - a third party's, or no copy can be made; the head stays as it is
            return Head(path, name, function, f"{entry.value}: {type(error).__name__}: {error}")
    return None


def _looked_up(function: Any) -> str:
    """The name under which *function* itself looks up an ``autograd.Function``; ``""`` if it looks up none."""
    called = called_functions(function, lambda v: isinstance(v, type) and issubclass(v, torch.autograd.Function))
    return next((name for name, value in called.items() if function.__globals__.get(name) is value), "")


def _put_by(value: Any) -> tuple[Head | None, Any]:
    """Which head put *value* where it is, and what was there before. Wrappers may have our attributes."""
    function = _function(value)
    befores = vars(function).get(_PUT_BY, {}) if isinstance(function, types.FunctionType) else {}
    head, before, _ = befores.get(id(value), (None, None, None))
    return head, before


def _places(module: nn.Module, is_end: Callable[[Any], bool], *names: str) -> Iterator[Held]:
    """Where the instance holds what *is_end* says: its attributes of these *names*, or all, and what they wrap."""
    state = vars(module)
    for name in names or [*state]:
        if isinstance(state.get(name), types.FunctionType | types.MethodType | functools.partial):
            yield from reached(Held(state[name], functools.partial(state.__setitem__, name)), module, is_end)


def _function(value: Any) -> Any:
    return value.__func__ if type(value) is types.MethodType else value
