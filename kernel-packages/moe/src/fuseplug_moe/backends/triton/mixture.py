"""The mixture of experts itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.dtypes import MODEL_DTYPES, have_model_dtypes
from fuseplug_backends.functional import computed_by
from fuseplug_backends.triton import FORMULAS, differentiable, offsets_fit, transparent

from ... import reference
from ...reference import GATES, Experts, GateUpLayout
from ..counts_on_host import HostCounts, host_counts_of
from . import steps
from .combine import combine
from .gate_backward import gate_backward
from .gated import project_gated
from .project import project
from .routing import counts, sort
from .steps import by_matrix, of_busy
from .weight_gradient import bias_gradient, weight_gradient

_T = TypeVar("_T")


def compute(experts: Experts, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`fuseplug_moe.reference.moe` in Triton: the same arguments, result and errors.

    The result is the reference's up to rounding. The reference computes calls that the kernels do not serve, for
    example in float64. Ambient autocast changes nothing: the kernel computes in the dtype of the experts.
    """
    arguments = (experts, x, top_k_index, top_k_weights)
    if not _serves(*arguments):
        return by_reference(reference.outside_autocast, reference.compute, *arguments)
    return reference.outside_autocast(_compute, *arguments)


moe = computed_by(compute, reference.moe)


def _serves(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> bool:
    """Whether the kernels, which count in 32 bits inside one matrix, serve these arguments."""
    matrices = _tensors_of(experts)
    biases = [bias for bias in (experts.gate_up_bias, experts.down_bias) if bias is not None]
    return (
        have_model_dtypes(x, weights)
        and experts.dtype in MODEL_DTYPES
        and all(tensor.dtype == experts.dtype for tensor in (*matrices, *biases))
        and all(matrix.is_contiguous() for matrix in matrices if matrix.dim() == 2 or experts.up is not None)
        and len({matrix.dim() for matrix in matrices}) == 1  # no list beside a stack
        and all(offsets_fit(matrix, 2) for matrix in matrices)
        and min(index.numel(), *x.shape, reference.first(experts.down).numel()) > 0
        and transparent(x, index, weights, *biases, *matrices)
        and (not isinstance(experts.activation, str) or GATES[experts.activation].row.formula in FORMULAS)
        # Which experts are idle is data, on which no graph can depend.
        and not (experts.idle == "none" and torch.compiler.is_compiling())
    )


def _tensors_of(experts: Experts) -> list[Tensor]:
    projections = (experts.gate_up, experts.up, experts.down)
    return [tensor for projection in projections for tensor in reference.tensors_of(projection)]


class _Form(NamedTuple):
    """The arguments of `moe` that are not tensors.

    Attributes:
        experts: The number of experts.
        first: How many tensors *gate_up* has.
        apart: How many tensors *up* has, if it is separate; otherwise 0.
    """

    experts: int
    first: int
    apart: int
    transposed: bool
    layout: GateUpLayout
    activation: str
    limit: float
    alpha: float

    @classmethod
    def of(cls, experts: Experts) -> _Form:
        return cls(
            experts.number,
            1 if isinstance(experts.gate_up, Tensor) else experts.number,
            0 if experts.up is None else 1 if isinstance(experts.up, Tensor) else experts.number,
            experts.transposed,
            "concatenated" if experts.up is not None else experts.layout,
            str(experts.activation),
            0.0 if experts.limit is None else experts.limit,
            experts.alpha,
        )

    @property
    def gate(self) -> tuple[str, str, float, float]:
        """The arguments of `project_gated` and `gate_backward` that describe the gate."""
        return self.layout, self.activation, self.limit, self.alpha

    def split(self, matrices: Sequence[_T]) -> tuple[Sequence[_T], Sequence[_T], Sequence[_T]]:
        """*matrices*, or items for each, split into those of gate and up, of up if it is separate, and of down."""
        apart = self.first + self.apart
        return matrices[: self.first], matrices[self.first : apart], matrices[apart:]


def _compute(experts: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    index = index.contiguous()
    apart_and_biased = experts.up is not None and experts.gate_up_bias is not None
    if not isinstance(experts.activation, str) or experts.post is not None or apart_and_biased:
        return steps.compute(experts, x, index, weights)
    route = sort(index, experts.number)
    host_counts = host_counts_of(experts, route, lambda route: counts(route, index, experts.number))
    result: Tensor = _mixture(
        (_Form.of(experts), host_counts),
        *(route, x, index, weights, experts.gate_up_bias, experts.down_bias),
        *_tensors_of(experts),
    )
    return result


_Constants = tuple[_Form, HostCounts | None]
"""The form; and, if the matrices of idle experts are to have no gradient, the number of rows of each expert."""


def _forward(
    constants: _Constants,
    needs: Sequence[bool],
    route: Tensor,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *matrices: Tensor,
) -> tuple[Tensor, tuple[Tensor]]:
    """The result; and gate and up before the activation, if gradients need them.

    Gate and up are ``2 · inner`` elements for each slot. The original keeps ``2 · hidden + 4 · inner``: the gathered
    rows of the tokens, gate and up, the activated gate, and the input and output of the second projection.
    """
    form, _ = constants
    gate_up, up, down = form.split(matrices)
    rows = x.to(matrices[0].dtype).contiguous()
    inner, before = project_gated(
        rows, route, gate_up, up, gate_up_bias, form.experts, form.transposed, index.shape[1], *form.gate, bool(needs)
    )
    out = project(inner, route, down, (), down_bias, form.experts, form.transposed, 0, True, False)
    return combine(out, index, weights.contiguous(), form.experts, x.dtype), (before,)


_OTHERS = 6
"""How many tensors come before the matrices."""


def _backward(
    constants: _Constants,
    needs: Sequence[bool],
    grad: Tensor,
    before: Tensor,
    route: Tensor,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *matrices: Tensor,
) -> list[Tensor | None]:
    """The gradients that are needed."""
    del gate_up_bias
    form, host_counts = constants
    gate_up, up, down = form.split(matrices)
    needs_gate_up, needs_up, needs_down = form.split(needs[_OTHERS:])
    rows = x.to(matrices[0].dtype).contiguous()
    grad = grad.to(matrices[0].dtype).contiguous()
    weights = weights.contiguous()
    experts, (slots, k) = form.experts, (index.numel(), index.shape[1])
    of_x = of_weights = of_gate_up_bias = of_down_bias = None
    of_gate_up: Sequence[Tensor | None] = [None] * (form.first + form.apart)
    of_down: Sequence[Tensor | None] = [None] * len(down)
    if needs[5]:
        of_down_bias = bias_gradient(grad, weights, route, slots, experts, k)
    if any((*needs[:5], *needs[_OTHERS:])):
        of_before, weighted, of_weights = gate_backward(
            grad, before, weights, index, route, down, down_bias, experts, form.transposed, *form.gate
        )
    if needs[1]:
        # First, so that its rows are freed before rows of the same size are gathered below.
        of_x = combine(
            project(of_before, route, gate_up, up, None, experts, not form.transposed, 0, True, False),
            *(index, None, experts, x.dtype),
        )
    if needs[4]:
        of_gate_up_bias = bias_gradient(of_before, None, route, slots, experts, 0)
    if any((*needs_gate_up, *needs_up)):
        both = _outer(form, of_before, 0, rows, k, route, slots)
        halves = both.chunk(2, dim=2 if form.transposed else 1) if up else (both, both)
        of_gate_up = [*by_matrix(halves[0], gate_up, needs_gate_up), *by_matrix(halves[1], up, needs_up)]
    if any(needs_down):
        of_down = by_matrix(_outer(form, grad, k, weighted, 0, route, slots), down, needs_down)
    of_matrices = of_busy([*of_gate_up, *of_down], host_counts, route)
    gradients = (None, of_x, None, of_weights, of_gate_up_bias, of_down_bias, *of_matrices)
    return [gradient for gradient, need in zip(gradients, needs, strict=True) if need]


def _outer(form: _Form, out: Tensor, out_k: int, into: Tensor, into_k: int, route: Tensor, slots: int) -> Tensor:
    """The gradient of all matrices that map *into* to a tensor with the gradient *out*."""
    sides = (into, out, route, slots, form.experts, into_k, out_k)
    if not form.transposed:
        sides = (out, into, route, slots, form.experts, out_k, into_k)
    return weight_gradient(*sides)


def _formula(
    constants: _Constants,
    route: Tensor,
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    *matrices: Tensor,
) -> Tensor:
    """The same mixture, in operations that can be differentiated again."""
    del route
    form, host_counts = constants
    gate_up, up, down = form.split(matrices)
    experts = Experts(
        form.experts,
        reference.projection_of(gate_up),
        reference.projection_of(up) if up else None,
        reference.projection_of(down),
        gate_up_bias,
        down_bias,
        form.transposed,
        form.layout,
        form.activation,
        form.limit,
        form.alpha,
        post=None,
        idle="zero" if host_counts is None else "none",
    )
    return reference.compute(experts, x, index, weights)


_mixture = differentiable(_forward, _backward, _formula)
