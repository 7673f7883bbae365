"""Find gated MLPs by structure alone; their behaviour then tells what they compute."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import cast

import torch
from torch import nn

from fuseplug import Proposal, Rejection, Site, Target
from fuseplug.reading import names
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.dtypes import MODEL_DTYPES

from .candidates import Mentioned, Projections, adapters_for
from .code_names import names_in, parameter_names, required
from .examples import MlpMix, MlpParts, Projection, longest_sum, make_example

_SPLITS = frozenset({"chunk", "split", "tensor_split", "unbind", "unflatten", "glu"})
_ATTENDS = frozenset({"softmax", "scaled_dot_product_attention", "attention_interface"})
"""Names in the code of a forward that cuts a tensor in two, or of an attention, whose projections are alike, too."""

_MULTIPLIES = frozenset({"matmul", "bmm", "einsum"})
"""Names in the code of an attention that other code may contain, too."""

_MOST_CANDIDATES = 256


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Say whether *site* is built like a gated MLP, and which one it may be.

    A module is built like a gated MLP if its forward takes one tensor and mentions linear children of fitting widths:
    two alike and one that follows them, or one that gives twice the width that another takes. The child that follows
    may be missing.
    """
    module = site.module
    cls = type(module)
    # Cheap tests come first: nearly all modules of a model leave at the first ones.
    if not module._modules or _is_of_torch(cls):
        return None
    linears = _linears(module)
    if not linears:
        return _without_linears(module)
    if len(linears) > 4:
        return None
    code_names = names(cls.forward, cls)
    roles = _roles({name: widths for name, widths in linears.items() if name in code_names}, code_names)
    # Neither equal widths everywhere nor a single projection is a sign of a gate. Then the report says nothing.
    sure = len(roles) == 1 and roles[0].down is not None
    expanding = sure and _is_expanding(linears, roles[0])
    multiplies = _MULTIPLIES & code_names.keys()
    if not roles or _ATTENDS & code_names.keys() or (multiplies and not expanding):
        return None
    if multiplies and not _has_activation(module, code_names):
        return Rejection("its forward multiplies matrices itself, and names no known activation")
    if (arguments := required(cls.forward)) != 1:
        return Rejection(f"its forward takes {arguments} tensors, not one") if sure and arguments is not None else None
    mentioned = _mentioned(module, linears, roles, code_names)
    if isinstance(mentioned, Rejection):
        return mentioned if sure else None
    dtype = _dtype(module, roles[0])
    if isinstance(dtype, Rejection):
        return dtype
    adapters = tuple(itertools.islice(adapters_for(mentioned), _MOST_CANDIDATES + 1))
    if len(adapters) > _MOST_CANDIDATES:
        return Rejection(f"it could be any of more than {_MOST_CANDIDATES} variants, too many to try")
    parts = _mlp_parts(mentioned)
    mixes = tuple(_mixes(dtype or torch.bfloat16, mentioned))
    called = {name for adapter in adapters for name in adapter.children_called}
    differences = any("sparse" in adapter.variant.split() for adapter in adapters)
    return [
        Proposal(
            target=Target(),
            adapters=adapters,
            example=functools.partial(make_example, parts),
            mixes=mixes,
            # Quantised weights do not say in which dtype the module is called.
            likely=mixes[1:] if dtype is None else None,
            # Six: the activation, the product, the steps on the way down, and the results of the three projections. One
            # for the result of each other child. Four for the excess of a gate over a quantile, a small difference.
            roundings=6.0 + len(called) + 4.0 * differences,
            working_roundings=_working_roundings(parts),
            covers=tuple(leaf for leaf in mentioned.leaves if leaf not in called),
            work=parts.inner / parts.hidden,
        )
    ]


def _is_expanding(linears: Mapping[str, tuple[int, int]], roles: Projections) -> bool:
    """Whether the only projections are gate, up and down, and down leads back to the width of the input."""
    width_in, width_out = linears[roles.gate]
    back = roles.down is not None and linears[roles.down][1] == width_in
    return back and not roles.extra and (roles.up is None or width_in != width_out)


def _has_activation(module: nn.Module, code_names: Mapping[str, int]) -> bool:
    """Whether the forward names an activation, or a child or an attribute that is one."""
    values = {name: value for name, value in {**vars(module), **module._modules}.items() if name in code_names}
    all_names = {*code_names, *(name for value in values.values() for name in names_in(value))}
    return any(activation.code_names & all_names for activation in ACTIVATIONS.values())


def _without_linears(module: nn.Module) -> Rejection | None:
    """A rejection for a module that plainly is part of a gated MLP, or a gated MLP with another kind of projections."""
    if parameter_names(type(module).forward) == ("gate", "up"):
        return Rejection("it is called with gate and up; Fuseplug fuses the module that has the projections")
    several = {name: widths for name, child in module._modules.items() if child and (widths := _several(child))}
    if len(several) < 2 or not _roles(several, {}):
        return None
    return Rejection(f"its projections, {' and '.join(several)}, hold several matrices each; only linear layers fit")


def _several(child: nn.Module) -> tuple[int, int] | None:
    """Widths in and out of a child that has several matrices, one for each case, and is called with the input alone."""
    weight = child._parameters.get("weight")
    if weight is None or weight.dim() != 3 or len(child._parameters) > 1 or required(type(child).forward) != 1:
        return None
    return None if _is_of_torch(type(child)) else (int(weight.shape[2]), int(weight.shape[1]))


def _working_roundings(parts: MlpParts) -> float:
    """Sixteen for the arithmetic of one element, forward and backward, plus the loss of the projections' sums.

    Added one after the other, *n* terms end up about √n / 5 roundings from their sum.
    """
    return 16.0 + math.sqrt(longest_sum(parts)) / 4


def _is_of_torch(cls: type[nn.Module]) -> bool:
    return str(getattr(cls.forward, "__module__", "")).startswith("torch.")


def _linears(module: nn.Module) -> dict[str, tuple[int, int]]:
    """The linear children of *module*, with their widths in and out."""
    widths = {name: _widths(child) for name, child in module._modules.items() if child is not None}
    return {name: width for name, width in widths.items() if width is not None}


def _widths(child: nn.Module) -> tuple[int, int] | None:
    """Widths in and out of any linear layer: LoRA, quantised and sharded layers name them, others have a matrix."""
    attributes = vars(child)
    for pair in (("in_features", "out_features"), ("infeatures", "outfeatures"), ("nx", "nf")):
        width_in, width_out = (attributes.get(name) for name in pair)
        if type(width_in) is int and type(width_out) is int:
            return width_in, width_out
    if (inner := _wrapped(child)) is not None:
        return _widths(inner)
    weight = child._parameters.get("weight")
    if weight is None or weight.dim() != 2 or child._modules or isinstance(child, nn.Embedding):
        return None
    return int(weight.shape[1]), int(weight.shape[0])


def _wrapped(child: nn.Module) -> nn.Module | None:
    """The layer that *child* wraps, if it wraps one."""
    if len(child._modules) == 1 and not any(parameter.dim() > 1 for parameter in child.parameters(recurse=False)):
        (inner,) = child._modules.values()
        return inner
    return child._modules.get("base_layer")


def _has_bias(child: nn.Module) -> bool:
    inner = _wrapped(child)
    return getattr(child, "bias", None) is not None if inner is None else _has_bias(inner)


def _roles(linears: Mapping[str, tuple[int, int]], code_names: Mapping[str, int]) -> list[Projections]:
    """All the ways in which *linears* can be the projections of a gated MLP."""
    fits = [
        Projections(a, b, down, _rest(linears, a, b, down))
        for a, b in itertools.combinations(linears, 2)
        for down in _rest(linears, a, b)
        if linears[a] == linears[b] and linears[down][0] == linears[a][1]
    ]
    fits += [
        Projections(gate, None, down, _rest(linears, gate, down))
        for gate, down in itertools.permutations(linears, 2)
        if linears[gate][1] == 2 * linears[down][0]
    ]
    if not fits and len(set(linears.values())) == 1:
        (first, *others), ((width_in, width_out),) = linears, set(linears.values())
        if len(others) == 1 and width_in != width_out:
            fits = [Projections(first, others[0], None)]
        elif not others and width_out % 2 == 0 and _SPLITS & code_names.keys():
            fits = [Projections(first, None, None)]
    # A layer that precedes must keep the width; and if there is one, everything else must be beyond doubt.
    fits = [
        roles for roles in fits if all(len({*linears[extra], linears[roles.gate][0]}) == 1 for extra in roles.extra)
    ]
    return fits if len(fits) == 1 or len(linears) < 4 else []


def _rest(names: Iterable[str], *taken: str) -> tuple[str, ...]:
    return tuple(name for name in names if name not in taken)


def _mentioned(
    module: nn.Module, linears: Mapping[str, tuple[int, int]], roles: list[Projections], code_names: Mapping[str, int]
) -> Mentioned | Rejection:
    """Everything that the forward mentions, sorted by kind."""
    drops: list[str] = []
    leaves: list[str] = []
    norms: dict[str, int] = {}
    for name, child in module._modules.items():
        if child is None or name in linears or name not in code_names:
            continue
        if isinstance(child, nn.Identity):
            continue
        tensors = list(child.parameters(recurse=False))
        if not tensors and not child._modules:
            (drops if isinstance(vars(child).get("p"), float | int) else leaves).append(name)
        elif not child._modules and all(p.dim() == 1 and p.shape[0] > 1 for p in tensors):
            norms[name] = int(tensors[0].shape[0])
        else:
            return Rejection(f"it also calls {name}, a {type(child).__name__}, which is no part of a gated MLP")
    parameters = {name: p for name, p in module._parameters.items() if name in code_names and p is not None}
    for name, parameter in parameters.items():
        if parameter.numel() != 1:
            return Rejection(f"it also uses its parameter {name}, which is no part of a gated MLP")
    widths = {width for pair in linears.values() for width in pair}
    numbers = {
        name: value for name, value in vars(module).items() if name in code_names and type(value) in (int, float)
    }
    return Mentioned(
        module=module,
        linears={name: width for name, width in linears.items() if name in code_names},
        roles=tuple(roles),
        drops=tuple(drops),
        norms=norms,
        leaves=tuple(leaves),
        scales=tuple(parameters),
        # A negative integer is a dimension.
        numbers=tuple(name for name, v in numbers.items() if v not in widths and not (type(v) is int and v < 0)),
        widths={name: value for name, value in numbers.items() if value in widths},
        code_names=code_names,
    )


def _dtype(module: nn.Module, roles: Projections) -> torch.dtype | Rejection | None:
    """The dtype of the projections' results, as far as their weights tell; ``None`` for quantised weights."""
    for parameter in cast("nn.Module", module._modules[roles.gate]).parameters():
        if parameter.dtype in MODEL_DTYPES:
            return parameter.dtype
        if parameter.dtype is torch.float64 or parameter.is_complex():
            return Rejection(f"{roles.gate} is {parameter.dtype}; supported are float32, bfloat16 and float16")
    return None


def _mlp_parts(mentioned: Mentioned) -> MlpParts:
    """The parts that examples are made from."""
    first = mentioned.roles[0]
    width_in, width_out = mentioned.linears[first.gate]
    downs = {roles.down for roles in mentioned.roles}
    return MlpParts(
        hidden=width_in,
        inner=width_out if first.up else width_out // 2,
        in_one=first.up is None,
        projections=tuple(
            Projection(name, *widths, _has_bias(cast("nn.Module", mentioned.module._modules[name])), name in downs)
            for name, widths in mentioned.linears.items()
        ),
        drops=mentioned.drops,
        norms=tuple(mentioned.norms.items()),
        scales=mentioned.scales,
        numbers=mentioned.numbers,
        drops_by_number="dropout" in mentioned.code_names,
        widths=tuple(mentioned.widths.items()),
    )


def _mixes(dtype: torch.dtype, mentioned: Mentioned) -> Iterator[MlpMix]:
    for same in dict.fromkeys((dtype, *MODEL_DTYPES)):
        yield MlpMix(same, same)
    if mentioned.numbers:
        yield MlpMix(torch.float32, torch.float32, other_numbers=True)
    if mentioned.casts_to_a_weight:
        yield MlpMix(torch.bfloat16, torch.float32)
        yield MlpMix(torch.float16, torch.float32)
