"""Puts replacements on, all or none, and takes them off again."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..contract import Target
from ..errors import PatchError
from .hooked import describe
from .replacement import compose, mark_of, replacement_of, replacements_in
from .replicas import leave_replicas, make_replicable
from .slots import bind, class_method, function_of, is_original, our_marks, our_replacements


@dataclass(frozen=True)
class Patch:
    """The planned replacement of one target, which need not be in place yet.

    Attributes:
        path: Where the module is.
        target: What is replaced in the module, or the method that a scope goes around.
        kernel_id: The kernel of the replacement.
        variant: The variant that the kernel computes.
        function: The replacement itself.
        module_ref: A weak reference to the module, so that a patch does not keep the model alive.
    """

    path: str
    target: Target
    kernel_id: str
    variant: str
    function: Callable[..., Any]
    module_ref: weakref.ref[nn.Module]

    def in_place(self) -> bool:
        """Whether the module carries this very replacement now."""
        module = self.module_ref()
        return module is not None and our_replacements(module, self.target.method).get(self.target) is self.function


@dataclass(frozen=True)
class Change:
    """What was done to one method of one module: the function bound there before (``None``: nothing) and after."""

    path: str
    method: str
    before: types.FunctionType | None
    after: types.FunctionType
    module_ref: weakref.ref[nn.Module]


def put_on(patches: Iterable[Patch]) -> list[Change]:
    """Apply *patches*. Patches that are already in place change nothing.

    Raises:
        PatchError: If a patch cannot be put on. All patches put on before it have been taken off again.
    """
    # By id, because different modules may be equal if they have an __eq__ of their own.
    wanted: dict[tuple[int, str], tuple[nn.Module, dict[Target, Patch]]] = {}
    for patch in patches:
        if (module := patch.module_ref()) is not None:
            _, by_target = wanted.setdefault((id(module), patch.target.method), (module, {}))
            by_target[patch.target] = patch
    changes: list[Change] = []
    try:
        for (_, method), (module, by_target) in wanted.items():
            path = next(iter(by_target.values())).path
            functions = {target: patch.function for target, patch in by_target.items()}
            if change := _put_on(module, path, method, functions):
                changes.append(change)
    except BaseException:
        take_off(changes)
        raise
    return changes


def patches_on(module: nn.Module, path: str) -> list[Patch]:
    """The replacements on *module* at *path* now, whether they were put on it or copied with it."""
    methods = dict.fromkeys(target.method for target in our_marks(module))
    parts = [(mark_of(part), part) for method in methods for part in our_replacements(module, method).values()]
    return [Patch(path, m.target, m.kernel_id, m.variant, part, weakref.ref(module)) for m, part in parts]


def take_off(changes: Sequence[Change]) -> list[Change]:
    """Undo *changes*, newest first, and keep later ones; return the changes that somebody else has replaced since."""
    left: list[Change] = []
    for change in reversed(changes):
        module = change.module_ref()
        if module is None:
            continue
        if not (is_original(module, change.method) or _take_off(module, change)):
            left.insert(0, change)
        if not our_marks(module):
            leave_replicas(module)
    return left


def _take_off(module: nn.Module, change: Change) -> bool:
    if not our_replacements(module, change.method):
        return False
    if function_of(module, change.method) is change.after:
        return bind(module, change.method, change.before)
    return _take_out(module, change)


def _take_out(module: nn.Module, change: Change) -> bool:
    """Undo *change* and keep later changes of the same method."""
    kept, now = replacements_in(change.before), our_replacements(module, change.method)
    brought = [part for target, part in replacements_in(change.after).items() if kept.get(target) is not part]
    rest = {target: part for target, part in now.items() if not any(part is gone for gone in brought)}
    method = class_method(module, change.method)
    if method is None or len(rest) == len(now):
        return True
    return bind(module, change.method, compose(method, rest) if rest else None)


def strip(module: nn.Module, path: str) -> list[Change]:
    """Take all our replacements off *module* itself; return the changes that could not be undone."""
    left = []
    for method in {target.method for target in our_marks(module)}:
        after = function_of(module, method)
        if not bind(module, method, None) and after is not None:
            left.append(Change(path, method, None, after, weakref.ref(module)))
    if not left:
        leave_replicas(module)
    return left


def _put_on(module: nn.Module, path: str, method: str, functions: Mapping[Target, Callable[..., Any]]) -> Change | None:
    original = class_method(module, method)
    ours = already = our_replacements(module, method)
    if original is None or not (ours or is_original(module, method)):
        raise PatchError(
            f"cannot replace {method} of {path or 'the model'} ({type(module).__name__}): expected its class's own, "
            f"found {describe(module, method)}; it was changed since the plan was made, so make a new plan",
            module=module,
        )
    if any(target.function is None and not target.around for target in (*functions, *ours)):
        ours = {target: part for target, part in ours.items() if target.around}
    before, wanted = function_of(module, method), ours | dict(functions)
    after = before if before is not None and already == wanted else compose(original, wanted)
    if not bind(module, method, after):
        raise PatchError(
            f"cannot replace {method} of {path or 'the model'} ({type(module).__name__}): "
            f"{describe(module, method)} holds it in a way that copies of the model share; take that off first",
            module=module,
        )
    make_replicable(module)
    for target, part in functions.items():
        if already.get(target) is not part and not target.around:
            replacement_of(part).tally.begin(module)
    return None if after is before else Change(path, method, before, after, weakref.ref(module))
