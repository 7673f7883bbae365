"""The gated delta rule in chunks of tokens, forward and backward in time and memory linear in the number of tokens.

In a chunk, let G be the sums of g since its start, S the state before it, and M the unit lower triangular matrix with
``β_i ⟨k_i, k_j⟩ e^(G_i - G_j)`` below its diagonal. The tokens of the chunk write ``U = M⁻¹ (β v - β e^G k S)``. Their
result is ``e^G q S + P U`` with ``P = ⟨q_i, k_j⟩ e^(G_i - G_j)`` for ``j ≤ i``, and the state after the chunk is
``e^(G_last) S + (e^(G_last - G) k)ᵀ U`` (Yang et al. 2024, arXiv:2412.06464). Every exponential here is a decay from an
earlier token to a later one, so none is above 1, however strong the decays are.

One token without gradients is a step of decoding, which has its own code.

The forward keeps the arguments, and the state before each segment of chunks, for the backward, which computes all else
again, a segment at a time. Everything is done by operations of PyTorch, for any device. The class of a segment says how
long a segment is, and how to go from chunk to chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseplug_backends.differentiating import differentiable
from fuseplug_backends.inductor import plain, standard_state

from .. import reference
from ..reference import working_dtype
from .segment import CHUNK, Form, Segment, over_length


def in_chunks(segment: type[Segment]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the differentiable function of a backend from the class that computes a few chunks.

    Returns:
        ``function(form, q, k, v, g, beta, initial_state)``, with the arguments and results of
        `fuseplug_gated_delta_rule.reference.compute`. Tensors are floating, not empty, and on one device.
    """

    def segments(v: Tensor) -> list[slice]:
        batch, tokens, heads, _ = v.shape
        step = max(1, segment.at_once // (batch * heads * CHUNK)) * CHUNK
        return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]

    def forward(form: Form, needs: Sequence[bool], *tensors: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
        q, k, v, g, beta, state = tensors
        batch, length, heads, values = v.shape
        with standard_state(q.device.type):
            if length == 1 and not needs:
                return _step(form, q, k, v, g, beta, state), ()
            parts = segments(v)
            shape = (batch * heads, k.shape[-1], values)
            states = q.new_zeros(len(parts) + 1, *shape, dtype=working_dtype(*tensors))
            if state is not None:
                states[0] = state.flatten(0, 1)
            result = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
            for n, tokens in enumerate(parts):
                some = segment(form, states[n], *(x[:, tokens] for x in (q, k, v, g, beta)))
                some.write_result(result[:, tokens])
                states[n + 1] = some.states[-1]
            return (result, states[-1].view(batch, heads, *shape[1:]).clone()), (states[:-1],)

    def backward(
        form: Form, needs: Sequence[bool], of_result: Tensor, of_state: Tensor, states: Tensor, *tensors: Any
    ) -> list[Tensor]:
        *inputs, state = tensors
        with standard_state(of_result.device.type):
            gradients = [torch.empty_like(x) for x in inputs]
            running = of_state.flatten(0, 1)
            for n, tokens in reversed([*enumerate(segments(inputs[2]))]):
                some = segment(form, states[n], *(x[:, tokens] for x in inputs))
                running = some.write_gradients([x[:, tokens] for x in gradients], of_result[:, tokens], running)
            if state is not None:
                gradients.append(running.view(state.shape).to(state.dtype))
        return [gradient for gradient, need in zip(gradients, needs, strict=False) if need]

    function: Callable[..., tuple[Tensor, Tensor]] = differentiable(forward, backward, _formula, plain)
    return function


def _step(
    form: Form, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token, as in decoding: the formula, in as few passes over the state as possible."""
    dtype, wide = q.dtype, working_dtype(q, k, v, g, beta, state)
    q, k, v, g, beta = (x.to(wide).transpose(1, 2) for x in (q, k, v, g, beta))
    if form.normalised:
        q, k = (x * over_length(x) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
    decay = (g if form.variant.per_channel else g.unsqueeze(-1)).exp().mT
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state * decay
    state.addcmul_(k.mT, (v - k @ state) * beta.unsqueeze(-1))
    return (q @ state).transpose(1, 2).to(dtype).contiguous(), state


def _formula(form: Form, *tensors: Any) -> tuple[Tensor, Tensor]:
    return reference.compute(*form, *tensors)
