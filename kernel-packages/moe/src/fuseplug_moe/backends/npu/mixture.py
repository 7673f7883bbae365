"""The mixture of experts itself, step by step."""

from __future__ import annotations

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by

from ... import reference
from ...reference import Experts, Projection, first
from ..counts_on_host import HostCounts, host_counts_of
from . import gmm, routing
from .gate import apply_gate
from .gmm import GmmFunction, HybridGmmFunction
from .routing import Route


def compute(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`fuseplug_moe.reference.moe` for tensors on an Ascend NPU: the same arguments, result and errors.

    The result is the reference's up to rounding. The reference computes calls for which the operations of torch_npu are
    not documented, for example without tokens or in float64. Ambient autocast changes nothing: the kernel computes in
    the dtype of the experts. A second derivative raises `RuntimeError`.
    """
    arguments = (experts, x, top_k_index, top_k_weights)
    if not _takes(*arguments):
        return by_reference(reference.outside_autocast, reference.compute, *arguments)
    return reference.outside_autocast(_compute, *arguments)


moe = computed_by(compute, reference.moe)


def _takes(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> bool:
    pairs = ((experts.gate_up, experts.gate_up_bias), (experts.down, experts.down_bias), (experts.up, None))
    return (
        x.device.type == "npu"
        and routing.takes(index, weights)
        and all(projection is None or gmm.takes(projection) for projection, _ in pairs)
        and all(bias is None or bias.dtype == first(of).dtype for of, bias in pairs if of is not None)
        and (experts.up is None or first(experts.up).dtype == experts.dtype)
        # Which experts are idle is data, on which no graph can depend.
        and not (experts.idle == "none" and torch.compiler.is_compiling())
    )


def _compute(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    rows, route = routing.dispatch(x.to(experts.dtype), index, experts.number)
    host_counts = host_counts_of(experts, route.counts, lambda counts: counts)
    gate = _linear(rows, experts, experts.gate_up, experts.gate_up_bias, route, host_counts)
    up = None if experts.up is None else _linear(rows, experts, experts.up, None, route, host_counts)
    inner = _gated(experts, gate, up, route).to(first(experts.down).dtype)
    out = _linear(inner, experts, experts.down, experts.down_bias, route, host_counts)
    if experts.post is not None:
        out = route.fill(experts.post(route.fill(out)))
    if x.dtype == torch.promote_types(out.dtype, weights.dtype):
        out = out.to(x.dtype)  # otherwise the sum would be rounded to the dtype of the experts
    return routing.combine(out, weights, route).to(x.dtype)


def _linear(
    rows: Tensor,
    experts: Experts,
    projection: Projection,
    bias: Tensor | None,
    route: Route,
    host_counts: HostCounts | None,
) -> Tensor:
    """Each expert's rows times its matrix, plus its bias."""
    if bias is not None:
        bias = bias.to(gmm.DTYPES[rows.dtype])
    result: Tensor
    if isinstance(projection, Tensor):
        weight = projection if experts.transposed else projection.transpose(1, 2)
        result = GmmFunction.apply(rows, weight, route.counts, bias)  # type: ignore[no-untyped-call]
    else:
        weights = projection if experts.transposed else [weight.t() for weight in projection]
        result = HybridGmmFunction.apply(rows, route.counts, bias, host_counts, *weights)  # type: ignore[no-untyped-call]
    return result


def _gated(experts: Experts, gate: Tensor, up: Tensor | None, route: Route) -> Tensor:
    if isinstance(experts.activation, str):
        return apply_gate(gate, up, experts.activation, experts.layout, experts.limit, experts.alpha)
    return route.fill(reference.gated(experts, route.fill(gate), None if up is None else route.fill(up)))
