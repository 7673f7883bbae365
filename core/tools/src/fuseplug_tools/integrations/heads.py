"""Serves heads that trainers put on models. A head is a forward of one instance that looks up a function of an op.

TRL's trainers put such a head on a model. The head never calls the module ``lm_head``, and its function is a
`torch.autograd.Function`. Core replaces methods of classes, and plain functions that these methods look up, and reads
what they compute; it can do neither here. So the head's own forward stays as it is, and the instance gets a copy of it
in which the name of the function means a `Head`.

The kernel for the function comes from a distribution with an entry point of the group ``fuseplug.heads``. The entry
point is called as ``offer(space, name, device_type, kernels, every_size=...)``: with the globals in which the forward
finds the function, the function's name there, the device type of the model, and the kernels that take part. It returns
one of these:

- ``None`` for a function of another kind;
- a string that says why it offers nothing;
- an object with a ``kernel_id`` and two methods, which take the arguments of a call. ``why_not(arguments)`` returns
  ``None`` if the kernel is to compute the call, ``""`` if the call is too small to gain, or another reason.
  ``compute(arguments)`` computes the call.
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
    """A forward that somebody put on a module, and the kernel for the function that the forward looks up.

    Attributes:
        path: The path of the module.
        name: The name under which the forward looks the function up.
        kernel_id: The id of the kernel; ``""`` if the head is left alone.
        why_not: Why the head is left alone; ``""`` if it is not.
        counter: The calls that the kernel computed, and those that the function itself computed, with the reasons.
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
        """How many calls the kernel computed, how many the function itself computed, and why."""
        count, target = self.counter, Target(function=self.name)
        return Calls((self.path,), target, self.kernel_id, count.fused, count.original, {}, tuple(count.reasons))

    def apply(self, *arguments: Any) -> Any:
        """Compute what the function's ``apply`` computes. The copy of the forward calls this method."""
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
        """Put back the very objects that were there. Copies that others hold call the function itself from now on."""
        module, self._module = self._module(), lambda: None
        for place in () if module is None else _places(module, lambda value: _put_by(value)[0] is self):
            place.put(_put_by(place.value)[1])  # type: ignore[misc]

    def put_on(self, module: nn.Module, function: types.FunctionType) -> Head:
        """Replace *function*, wherever the instance *module* holds it, by a copy that calls `apply`."""
        copy, self._module = rebound(function, {self.name: self}), weakref.ref(module)  # type: ignore[dict-item]
        # Kept in the copy, which goes with the module. The head, which lives as long as the copy, would keep the module
        # alive.
        setattr(copy, _PUT_BY, {})
        for place in _places(module, lambda value: _function(value) is function):
            after = types.MethodType(copy, module) if type(place.value) is types.MethodType else copy
            getattr(copy, _PUT_BY)[id(after)] = self, place.value, after
            place.put(after)  # type: ignore[misc]  # every end has a put: a method is an end itself
        return self

    def _count(self, why: str | None) -> None:
        """Count a call. *why* is ``None`` if the kernel computed it, ``""`` if it was too small, or another reason."""
        count = self.counter
        count.fused += why is None
        count.original += why is not None
        if why:
            count.reasons[why] = None
            if count.original == ENOUGH and not count.fused and rank() == 0:
                _logger.warning("%s, but none of its first %d calls: %s", self, ENOUGH, "; ".join(count.reasons))


def serve(model: nn.Module, manager: KernelManager, **options: Any) -> list[Head]:
    """Serve the heads that somebody put on modules of *model*, and log which are left alone, and why.

    A head that is already served stays so. Every other head is logged to ``logging.getLogger("fuseplug")``. A warning
    follows if the function itself computes the first ten calls of a head although they are large.

    Args:
        model: The model whose modules are searched.
        manager: The manager whose kernels take part.
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
                own = next((p for m in (module, model) for p in m.parameters()), torch.empty(0, device="cpu"))
                device = torch.device(options.get("device") or own.device)
                head = _made(path, module, _function(value), barred, device.type, kernels, every_size=every)
                if head is None:
                    continue
                _logger.log(logging.DEBUG if rank() else logging.INFO, "%s", head)
            heads.append(head)
    return heads


def _made(path: str, module: nn.Module, function: Any, barred: str, *question: Any, **options: Any) -> Head | None:
    """The head with the first answer of a distribution, put on if it has a kernel; ``None`` without an answer."""
    name = _looked_up(function)
    for entry in importlib_metadata.entry_points(group="fuseplug.heads"):
        try:
            offered = entry.load()(function.__globals__, name, *question, **options)
            if offered is not None:
                head = Head(path, name, function, barred or offered)
                return head.put_on(module, function) if head.kernel_id else head
        except Exception as error:  # noqa: BLE001 - third-party code, or no copy can be made; the head stays as it is
            return Head(path, name, function, f"{entry.value}: {type(error).__name__}: {error}")
    return None


def _looked_up(function: Any) -> str:
    """The name under which *function* itself looks up an ``autograd.Function``; ``""`` if it looks up none."""
    called = called_functions(function, lambda v: isinstance(v, type) and issubclass(v, torch.autograd.Function))
    return next((name for name, value in called.items() if function.__globals__.get(name) is value), "")


def _put_by(value: Any) -> tuple[Head | None, Any]:
    """The head that put *value* where it is, and what was there before. Wrappers may have copied our attribute."""
    function = _function(value)
    befores = vars(function).get(_PUT_BY, {}) if isinstance(function, types.FunctionType) else {}
    head, before, _ = befores.get(id(value), (None, None, None))
    return head, before


def _places(module: nn.Module, is_end: Callable[[Any], bool], *names: str) -> Iterator[Held]:
    """Where the instance holds what *is_end* accepts: its attributes of these *names*, or all, and what they wrap."""
    state = vars(module)
    for name in names or [*state]:
        if isinstance(state.get(name), types.FunctionType | types.MethodType | functools.partial):
            yield from reached(Held(state[name], functools.partial(state.__setitem__, name)), module, is_end)


def _function(value: Any) -> Any:
    return value.__func__ if type(value) is types.MethodType else value
