"""Makes a patch from the results of verification: guard, adapter and kernel in one replacement."""

from __future__ import annotations

import weakref
from dataclasses import fields, replace

from torch import nn

from fuseplug_verify import Conditions, Semantics, Subject

from ..contract import Compute, Rejection, Scope, Target
from .accepts import Accepts
from .gains import EVERY_SIZE, Gains
from .journal import Patch
from .mark import Mark
from .replacement import replacement, replacement_of
from .scoping import Around, key_of
from .slots import our_replacements
from .subjects import own_method


def patch_of(
    module: nn.Module,
    path: str,
    mark: Mark,
    compute: Compute,
    semantics: Semantics,
    ran: Conditions,
    subject: Subject,
    *,
    gradients: bool,
    traced: bool = True,
    gains: Gains = EVERY_SIZE,
    scope: Scope | None = None,
    lazy: bool = False,
) -> Patch | Rejection:
    """Make the replacement of a target without putting it in place.

    Args:
        module: The module of the target.
        path: Where the module is in its model.
        mark: Which kernel replaces which target.
        compute: The kernel's function.
        semantics: What the target was found to compute.
        ran: What the kernel was found to compute on its device.
        subject: What is replaced.
        gradients: Whether the kernel computes calls with gradients.
        traced: Whether the kernel computes calls that are traced.
        gains: The sizes of the calls that the kernel computes.
        scope: The calls during which the target is replaced; ``None``: always.
        lazy: Whether the kernel's results may be lazy.

    Returns:
        The patch; or a rejection, if the adapter raises or the replacement could never run the kernel.
    """
    tried = semantics.accepts
    watch = replace(
        tried.watch,
        contiguous=ran.contiguous,
        no_autocast=tried.watch.no_autocast or ran.no_autocast,
        no_grad=tried.watch.no_grad or not gradients,
        unhooked=lazy,
        untraced=tried.watch.untraced or not traced,
    )
    calls = tuple(call.limited(tried.main, ran.ranks) for call in tried.calls)
    key = None if scope is None else key_of(mark.kernel_id, scope)
    verified = {item.name: getattr(tried, item.name) for item in fields(tried)}
    limited = {"calls": calls, "dtypes": ran.dtypes, "watch": watch}
    accepts = Accepts(**{**verified, **limited}, space=subject.space, scope=key, gains=gains)
    try:
        function = replacement(subject.original, semantics.adapter, compute, mark, accepts)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's bind may raise anything, or exit
        return Rejection(f"{type(error).__name__} while binding its adapter: {error}", kind="error")
    if why := replacement_of(function).why_never(module if mark.target.function is None else None):
        return Rejection(f"{why}; without that it can be fused", kind="unlike")
    return Patch(path, mark.target, mark.kernel_id, mark.variant, function, weakref.ref(module))


def patch_around(module: nn.Module, path: str, mark: Mark, scope: Scope) -> Patch | Rejection:
    """Make the `Around` for the method of *scope*, without putting it in place.

    Args:
        module: The site.
        path: Where the site is in its model.
        mark: Identifies the kernel of the scope. The target of the scope replaces that of the mark.
        scope: The calls during which the targets of the kernel are replaced.

    Returns:
        The patch; or a rejection, if nothing can be put around the method.
    """
    method = own_method(module, scope.method)
    if isinstance(method, Rejection):
        return method
    target = Target(scope.method, around=mark.kernel_id)
    around = Around(replace(mark, target=target), scope)
    present = our_replacements(module, scope.method).get(target)
    if isinstance(present, Around) and (present.mark, present.scope) == (around.mark, around.scope):
        around = present
    return Patch(path, target, mark.kernel_id, mark.variant, around, weakref.ref(module))
