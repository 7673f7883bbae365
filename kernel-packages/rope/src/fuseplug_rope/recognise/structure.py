"""Where rotary embeddings are found in a module: in the functions that its methods call, and in methods of its own."""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fuseplug import Adapter, Example, Proposal, Rejection, Site, Target
from fuseplug.reading import hazard, remembered
from fuseplug_backends.dtypes import usual_mixes
from fuseplug_backends.looked_up import calls_by_name, looked_up, methods_of

from ..reference import VARIANTS, Variant
from . import function_calls, modules
from .adapters import ConformerAdapter, MethodAdapter, RotaryAdapter, RowAlignment
from .function_calls import HALF_TYPES, CallMix, Form, normal
from .roles import Roles, is_rotary, is_rotary_name, parameter_names, plain_function, roles_of

_ROUNDINGS = 6.0
"""A table's gradient is the sum of four parts: of q and of k, for the two coordinates of a plane. Each part, perhaps
twice the size of the sum, is rounded by half a rounding. That makes four, and about two more for adding in pairs."""

_HEAD_DIMS = ("qk_rope_head_dim", "head_dim", "head_size", "attention_head_size")


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Propose RoPE for every rotary function that a method of *site* looks up, and for a rotary method of its own.

    Without these, propose it for *site* as a whole if that is a rotation itself (`modules`).

    A rotary function takes the tensors that it rotates, then cos and sin (or angles, if it is named rotary). Calling a
    function shows in which forms it can be called; Fuseplug finds out which variant it is.
    """
    module = site.module
    proposals: list[Proposal] = []
    rejected: list[str] = []
    for target, function in _targets(type(module)):
        answer = _proposal(site, target, function)
        if isinstance(answer, Rejection):
            rejected.append(answer.reason)
        elif answer is not None:
            proposals.append(answer)
    if proposals:
        return proposals
    whole = modules.match(module)
    return whole if isinstance(whole, list) or not rejected else Rejection("; ".join(dict.fromkeys(rejected)))


def _targets(cls: type) -> Iterator[tuple[Target, Any]]:
    """The rotary functions that methods of *cls* call, and its own rotary methods."""
    for name, method in methods_of(cls).items():
        if is_rotary_name(name):
            yield Target(name), method
    yield from looked_up(cls, is_rotary)


def _proposal(site: Site, target: Target, function: Any) -> Proposal | Rejection | None:
    if target.function is None:
        return _proposal_of_method(site, target, function)
    understood = _understand(function)
    if isinstance(understood, Rejection):
        return understood
    roles, forms, adapters, widens = understood
    dims = _dims_given(site, target, function, roles)
    return Proposal(
        target=target,
        adapters=adapters,
        example=functools.partial(function_calls.example, roles, function_calls.SMALL_HEAD, _head_dim(site.module)),
        **_checked(site, function_calls.mixes(list(forms), roles, _dtype(site.module)), dims, widens=widens),
    )


def _dims_given(site: Site, target: Target, function: Any, roles: Roles) -> set[Any]:
    """The dimensions that the method of *target* gives *function* by name. A kernel is compiled for each."""
    if roles.unsqueeze is None:
        return set()
    name = parameter_names(plain_function(function))[roles.unsqueeze]
    calls = calls_by_name(methods_of(type(site.module))[target.method]).get(target.function or "", ())
    values = [keyword.value for call in calls for keyword in call.keywords if keyword.arg == name]
    return {value.value for value in values if isinstance(value, ast.Constant)}


def _checked(site: Site, mixes: list[CallMix], dims: set[Any], *, widens: bool) -> dict[str, Any]:
    """The mixes of a proposal, and how exact kernels are in them. Kernels run in the forms with one of *dims*.

    If q and k *widen* to the dtype of the tables, a module in half precision is not called with tables in float32: the
    rotated q and k would meet a v in half precision, which no attention accepts.
    """
    # Some models keep their tables in float32; and all do under autocast, which gives q and k in half precision.
    wide = mixes[0]._replace(table=torch.float32)
    usable = usual_mixes(mixes, site.device_type) if not widens or wide.x is torch.float32 else ()
    return {
        "mixes": tuple(mixes),
        "likely": (
            *(mix for mix in usable if mix == wide._replace(x=mix.x, others=mix.x)),
            *(mix for mix in mixes if mix.form != mixes[0].form and mix.form.dim in (None, *dims)),
        ),
        "roundings": _ROUNDINGS,
    }


@remembered
def _understand(
    function: Callable[..., Any],
) -> tuple[Roles, tuple[Form, ...], tuple[Adapter, ...], bool] | Rejection:
    """A rotary function's roles, the forms that it takes, its adapters, whether it widens; or why it is left alone."""
    plain = plain_function(function)
    if plain is None:
        return Rejection("its rotary function is TorchScript, which cannot be read: apply before scripting")
    roles = roles_of(plain)
    if isinstance(roles, Rejection):
        return roles
    if why := hazard(function):
        return Rejection(f"{plain.__name__}: {why}", kind="unlike")
    forms, why, bare = function_calls.accepted(function, roles)
    if not forms:
        return Rejection(f"{plain.__name__} takes none of the known forms of q, k, cos and sin: {why}")
    adapters = tuple(_adapters(roles, forms, bare))
    if not adapters:
        return Rejection(f"{plain.__name__} takes its tables in {len(forms)} forms, but no variant takes all of them")
    return roles, tuple(forms), adapters, function_calls.widens(function, forms[0], roles)


def _adapters(roles: Roles, forms: list[Form], bare: bool) -> Iterator[RotaryAdapter]:
    """The adapters for a function that takes *forms*: the variants that take them, with each way to place tables."""
    shares = {function_calls.WIDTH_SHARES[form.width] for form in forms}
    dims: list[int | None] = [None]
    if roles.unsqueeze is None:
        common = set.intersection(*(set(form.layout.dims) for form in forms))
        dims = [dim for dim in dict.fromkeys(forms[0].layout.dims) if dim in common]
    alignments: list[RowAlignment] = [
        form.alignment for form in forms if form.alignment != "all" and roles.pairs is None
    ] or ["all"]
    gathers = any(form.positions == "table" for form in forms)
    for name, variant in VARIANTS.items():
        if _fits(variant, shares) and (variant.form == "complex") is (roles.frequencies is not None):
            for dim in dims:
                for alignment in alignments:
                    yield RotaryAdapter(name, roles, dim, gathers, alignment, bare)


def _fits(variant: Variant, shares: set[float]) -> bool:
    """Whether *variant* rotates with tables for these *shares* of a head: all of it or, if it may, also less."""
    rotated = {share * (2 if variant.table == "half" else 1) for share in shares}
    return rotated == {1.0} if variant.width == "whole" else max(rotated) <= 1.0 and rotated != {1.0}


def _head_dim(module: nn.Module) -> int | None:
    """The expected size of a head, for programs that are compiled for it; only a hint."""
    sizes = (vars(module).get(name) for name in _HEAD_DIMS)
    return next((size for size in sizes if type(size) is int and size > 0 and size % 8 == 0), None)


def _dtype(module: nn.Module) -> torch.dtype:
    dtypes = (*HALF_TYPES, torch.float32)
    return next((p.dtype for p in module.parameters() if p.dtype in dtypes), torch.float32)


def _proposal_of_method(site: Site, target: Target, method: Any) -> Proposal | Rejection:
    module = site.module
    name = f"{type(module).__name__}.{target.method}"
    if not isinstance(method, types.FunctionType):
        return Rejection(f"{name} is a {type(method).__name__}; only a plain method can be replaced on an instance")
    bound: Any = types.MethodType(method, module)
    if why := hazard(bound):
        return Rejection(f"{name}: {why}", kind="unlike")
    if not isinstance(roles := roles_of(bound), Rejection):
        return _proposal_of_method_like_a_function(site, target, bound, roles)
    heads, head_dim = (vars(module).get(attribute) for attribute in ("num_heads", "head_size"))
    names = method.__code__.co_varnames[: method.__code__.co_argcount]
    if len(names) != 3 or type(heads) is not int or type(head_dim) is not int:
        return Rejection(
            f"{name}({', '.join(names)}) is a rotary method of an unknown form; known are (self, q, k, cos, sin), and "
            "(self, hidden_states, tables) of a module with num_heads and head_size"
        )
    pairs = [(x, x) for x in (*HALF_TYPES, torch.float32)] + [(x, torch.float32) for x in HALF_TYPES]
    return Proposal(
        target=target,
        adapters=tuple(
            ConformerAdapter(name, "num_heads", "head_size")
            for name, variant in VARIANTS.items()
            if variant.table == "full" and variant.width == "whole"
        ),
        example=functools.partial(_example_of_method, heads, head_dim),
        mixes=tuple(sorted(pairs, key=lambda pair: pair[0] is not _dtype(module))),
        roundings=_ROUNDINGS,
    )


def _proposal_of_method_like_a_function(site: Site, target: Target, bound: Any, roles: Roles) -> Proposal | Rejection:
    """An answer for a method that is called like a rotary function; an attribute may say how much it rotates."""
    module, head_dim = site.module, _head_dim(site.module)
    name = f"{type(module).__name__}.{target.method}"
    if head_dim is None:
        return Rejection(f"{name} is a rotary method of a module that does not say how wide a head is")
    forms, why, bare = function_calls.accepted(bound, roles, head_dim, tuple(function_calls.WIDTH_SHARES))
    adapters = tuple(MethodAdapter(rotary.variant, rotary) for rotary in _adapters(roles, forms, bare)) if forms else ()
    if not adapters:
        return Rejection(f"{name} takes none of the known forms of q, k, cos and sin: {why}")
    return Proposal(
        target=target,
        adapters=adapters,
        example=functools.partial(function_calls.example, roles, head_dim, head_dim),
        **_checked(
            site,
            function_calls.mixes(forms, roles, _dtype(module)),
            {form.dim for form in forms},
            widens=function_calls.widens(bound, forms[0], roles, head_dim),
        ),
    )


def _example_of_method(
    heads: int, head_dim: int, mix: tuple[torch.dtype, torch.dtype], size: int, generator: torch.Generator
) -> Example:
    """Rows ``(2, tokens, heads * head_dim)`` and tables ``(2, tokens, 1, 1, head_dim)`` in the dtypes of *mix*."""
    tokens = max(3, -(-size // (2 * heads * head_dim)))
    shapes = ((2, tokens, heads * head_dim), (2, tokens, 1, 1, head_dim))
    return Example([normal(generator, shape, dtype) for shape, dtype in zip(shapes, mix, strict=True)])
