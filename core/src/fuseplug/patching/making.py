"""Makes a patch from the results of verification: guard, adapter and kernel in one replacement."""

from __future__ import annotations

import weakref
from dataclasses import replace

from torch import nn

from ..contract import Compute, Rejection
from ..verification import Ran, Semantics, Subject
from .journal import Patch
from .mark import Mark
from .replacement import replacement, replacement_of


def patch_of(
    module: nn.Module,
    path: str,
    mark: Mark,
    compute: Compute,
    semantics: Semantics,
    ran: Ran,
    subject: Subject,
    *,
    differentiable: bool,
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
        differentiable: Whether gradients flow through the kernel.

    Returns:
        The patch; or a rejection, if the adapter raises or the replacement could never run the kernel.
    """
    found = semantics.accepts
    watch = replace(
        found.watch,
        contiguous=ran.contiguous,
        no_autocast=found.watch.no_autocast or ran.no_autocast,
        no_grad=not differentiable,
    )
    calls = tuple(call.limited(found.main, ran.ranks) for call in found.calls)
    accepts = replace(found, calls=calls, dtypes=ran.dtypes, watch=watch, space=subject.space)
    try:
        function = replacement(subject.original, semantics.adapter, compute, mark, accepts)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's bind may raise anything, or exit
        return Rejection(f"{type(error).__name__} while binding its adapter: {error}", kind="error")
    if why := replacement_of(function).why_never(module if mark.target.function is None else None):
        return Rejection(f"{why}; without that it can be fused", kind="unlike")
    return Patch(path, mark.target, mark.kernel_id, mark.variant, function, weakref.ref(module))
