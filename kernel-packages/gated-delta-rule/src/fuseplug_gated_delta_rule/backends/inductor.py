"""The gated delta rule in chunks of tokens, forward and backward in time and memory linear in their number.

In a chunk, let G be the sums of g since it began, S the state before it, and M the unit lower triangular matrix with
``β_i ⟨k_i, k_j⟩ e^(G_i - G_j)`` below its diagonal. What its tokens write is ``U = M⁻¹ (β v - β e^G k S)``; the result
is ``e^G q S + P U`` with ``P = ⟨q_i, k_j⟩ e^(G_i - G_j)`` for ``j ≤ i``; and the state after it is
``e^(G_last) S + (e^(G_last - G) k)ᵀ U`` (Yang et al. 2024, arXiv:2412.06464). Every decay here is that of a token since
an earlier one, so none is above 1, however strong they are.

One token without gradients is a step of decoding, and computed by itself.

Between forward and backward the arguments are kept, and the state before each segment of chunks. All else is computed
anew, a segment at a time, so that its matrices stay in the processor's cache. It is matmuls and elementwise operations
of PyTorch; nothing is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug.fallback import by_reference
from fuseplug_backends.differentiating import differentiable
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain, standard_state

from .. import reference
from ..reference import EPS, Variant, working_dtype

_CHUNK, _BLOCK = 64, 16
_AT_ONCE = 1 << 11
"""Tokens of a segment, those of all heads counted."""


class _Form(NamedTuple):
    """What is no tensor among the arguments, in the order of the reference's."""

    variant: Variant
    normalised: bool


def compute(
    variant: Variant,
    normalised: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`fuseplug_gated_delta_rule.reference.gated_delta_rule` in chunks: the same arguments, result and errors.

    Matmuls are in float32, under autocast too. For ``torch.compile``, ``torch.export`` and other tracers, and where a
    channel's decay is above 0, it *is* the reference.
    """
    tensors = (q, k, v, g, beta, initial_state)
    given = [tensor for tensor in tensors if tensor is not None]
    served = plain(*given) and all(t.numel() and t.is_floating_point() and t.device == q.device for t in given)
    # What grows may overflow where a product of decays from both sides of a block's first row does not.
    if not served or (variant.per_channel and bool((g > 0).any())):
        return by_reference(reference.compute, variant, normalised, *tensors)
    result: tuple[Tensor, Tensor] = _in_chunks(_Form(variant, normalised), *tensors)
    return result


gated_delta_rule = computed_by(compute, reference.gated_delta_rule)


class _PerHead:
    """Products of pairs of tokens, where a head has one decay.

    Args:
        sums: Those of g in each chunk, ``(chunks, heads, tokens, 1)``, in float64.
        q: ``(chunks, heads, tokens, channels)``.
        k: As *q*.

    Attributes:
        qk: ``⟨q_i, k_j⟩ e^(G_i - G_j)`` for ``j ≤ i``, and 0 elsewhere, ``(chunks, heads, tokens, tokens)``.
        kk: The same of k with itself.
    """

    def __init__(self, sums: Tensor, q: Tensor, k: Tensor) -> None:
        self._q, self._k = q, k
        self._decays = _decays(sums - sums.mT, q.dtype)
        self.qk, self.kk = ((x @ k.mT).mul_(self._decays) for x in (q, k))

    def gradients(self, of_qk: Tensor, of_kk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Those of q, of k as the first and as the second factor, and of g, ``(chunks, heads, tokens, 1)``."""
        products = (of_qk * self.qk).addcmul_(of_kk, self.kk)
        # A token's g is in the decays of the pairs of one before it with itself, or with a later one.
        later = products.new_ones(products.shape[-2:]).triu_()
        of_g = (later @ products).tril_(-1).sum(-1, keepdim=True)
        of_qk, of_kk = of_qk * self._decays, of_kk * self._decays
        return of_qk @ self._k, of_kk @ self._k, (of_qk.mT @ self._q).add_(of_kk.mT @ self._k), of_g


class _PerChannel:
    """`_PerHead`, where each key channel has a decay; sums are ``(chunks, heads, tokens, channels)``.

    Rows are taken in blocks. A product with a row of an earlier block is a matmul, of factors with the decays since the
    block's first row and until it. In a block, all pairs of rows are multiplied out.
    """

    def __init__(self, sums: Tensor, q: Tensor, k: Tensor) -> None:
        self._q, self._k = q, k
        blocks = _blocks(sums)
        first = blocks[..., :1, :]
        inside = (blocks - first).to(q.dtype)
        self._near = _decays(inside.unsqueeze(-2) - inside.unsqueeze(-3), q.dtype, dim=-3)
        self._near_k = self._near * _blocks(k).unsqueeze(-3)
        self._since = inside.exp_().flatten(2, 3)
        self._far = []
        for block in range(first.shape[2]):
            rows, before = _rows(block)
            self._far.append((rows, before, (first[:, :, block] - sums[:, :, before]).to(q.dtype).exp_()))
        self.qk, self.kk = self._product(q), self._product(k)

    def _product(self, x: Tensor) -> Tensor:
        product = x.new_zeros(*x.shape[:3], x.shape[2])
        inside = (self._near_k @ _blocks(x).unsqueeze(-1)).squeeze(-1)
        since = x * self._since
        for block, (rows, before, until) in enumerate(self._far):
            product[:, :, rows, rows] = inside[:, :, block]
            product[:, :, rows, before] = since[:, :, rows] @ (self._k[:, :, before] * until).mT
        return product

    def gradients(self, of_qk: Tensor, of_kk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # A token with itself has no decay, and so no part in the gradient of g.
        of_itself = of_qk.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        of_second = torch.zeros_like(self._k)
        of_q, of_k = self._gradient(of_qk.tril(-1), self._q, of_second), self._gradient(of_kk, self._k, of_second)
        of_g = _from_here((self._k * (of_k - of_second)).addcmul_(self._q, of_q))
        return of_q.addcmul_(of_itself, self._k), of_k, of_second.addcmul_(of_itself, self._q), of_g

    def _gradient(self, grad: Tensor, x: Tensor, of_second: Tensor) -> Tensor:
        """That of *x* in its product with k; that of k is added to *of_second*."""
        inside = torch.stack([grad[:, :, rows, rows] for rows, *_ in self._far], 2)
        gradient = (inside.unsqueeze(-2) @ self._near_k).flatten(2, 4)
        of_second += (self._near * inside.unsqueeze(-1) * _blocks(x).unsqueeze(-2)).sum(-3).flatten(2, 3)
        since = x * self._since
        for rows, before, until in self._far:
            far = grad[:, :, rows, before]
            gradient[:, :, rows] += (far @ (self._k[:, :, before] * until)).mul_(self._since[:, :, rows])
            of_second[:, :, before] += (far.mT @ since[:, :, rows]).mul_(until)
        return gradient


def _from_here(x: Tensor) -> Tensor:
    """For each token of a chunk, the sum of *x* over it and all later ones."""
    return x.flip(2).cumsum(2).flip(2)


def _until_here(x: Tensor) -> Tensor:
    """For each token of a chunk, the sum of *x* over all earlier ones."""
    return functional.pad(x[:, :, :-1].cumsum(2), (0, 0, 1, 0))


def _blocks(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, _BLOCK, x.shape[3])


def _rows(block: int) -> tuple[slice, slice]:
    """The rows of *block*, and those before it."""
    start = block * _BLOCK
    return slice(start, start + _BLOCK), slice(start)


def _decays(differences: Tensor, dtype: torch.dtype, dim: int = -2) -> Tensor:
    """``e^`` *differences* between a row, along *dim*, and one up to it, along the next dimension; 0 for later ones."""
    rows = differences.shape[dim]
    later = torch.ones(rows, rows, dtype=torch.bool, device=differences.device).triu_(1)
    later = later.view(rows, rows, *[1] * (-2 - dim))
    return differences.to(dtype).masked_fill_(later, -math.inf).exp_()


class _Segment:
    """A few chunks: what forward and backward both compute of them.

    Tensors are ``(chunks, heads, tokens, channels)``, where heads are those of the whole batch, and channels are one
    for what has one number for a head.

    Args:
        form: What is no tensor.
        state: ``(heads, key channels, value channels)`` before the first chunk, in the dtype of all that is computed.
        inputs: q, k, v, g and beta of some tokens, as the reference takes them.
    """

    def __init__(self, form: _Form, state: Tensor, *inputs: Tensor) -> None:
        q, k, v, g, beta = inputs
        self.form, (self.batch, self.tokens, _, channels) = form, q.shape
        self.chunk = min(_CHUNK, -(-self.tokens // _BLOCK) * _BLOCK)
        self.q, self.k, self.v, self.beta = (self._chunked(x, state) for x in (q, k, v, beta.unsqueeze(-1)))
        self.lengths = (channels**-0.5, 1.0)
        """Of q and k, once they are normalised."""
        over = [_over_length(x) if form.normalised else 1.0 for x in (self.q, self.k)]
        self.scales = [factor * length for factor, length in zip(over, self.lengths, strict=True)]
        self.q.mul_(self.scales[0])
        self.k.mul_(self.scales[1])
        self._decay(self._chunked(g if form.variant.per_channel else g.unsqueeze(-1), state))
        # The inverse, since a matmul is several times faster than a solver.
        one = torch.eye(self.chunk, dtype=state.dtype, device=state.device).expand_as(self.pairs.kk)
        self.inverse = torch.linalg.solve_triangular(self.pairs.kk * self.beta, one, upper=False, unitriangular=True)
        self._scan(state)

    def _decay(self, g: Tensor) -> None:
        """Find the decays of each token: those of its pairs, since the chunk began, until it ends; and of the chunk."""
        # Below, a decay is 0 in this dtype, and a sum would leave nothing of what is added to it. What is not finite
        # gives NaN, as in originals.
        least = 1.2 * math.log(torch.finfo(g.dtype).tiny)
        sums = g.clamp(min=least).add_(0 * g).cumsum(2, dtype=torch.float64)
        self.pairs = (_PerChannel if self.form.variant.per_channel else _PerHead)(sums, self.q, self.k)
        self.since = sums.to(g.dtype).exp()
        self.until = (sums[:, :, -1:] - sums).to(g.dtype).exp_()
        self.through = self.since[:, :, -1].unsqueeze(-1)

    def _scan(self, state: Tensor) -> None:
        """Find what each token writes, and the state before each chunk and after the last."""
        self.read_q, self.read_k, self.written_k = self.q * self.since, self.k * self.since, self.k * self.until
        self.reads, self.writes = self.read_k * self.beta, self.v * self.beta
        self.states = state.new_empty(len(self.q) + 1, *state.shape)
        self.states[0] = state
        for n in range(len(self.q)):
            missing = torch.baddbmm(self.writes[n], self.reads[n], self.states[n], alpha=-1)
            torch.bmm(self.inverse[n], missing, out=self.writes[n])
            torch.mul(self.states[n], self.through[n], out=self.states[n + 1])
            self.states[n + 1].baddbmm_(self.written_k[n].mT, self.writes[n])

    def write_result(self, result: Tensor) -> None:
        """Write what the tokens read into *result*, ``(batch, tokens, heads, value channels)``."""
        self._into(result, (self.read_q @ self.states[:-1]).add_(self.pairs.qk @ self.writes))

    def write_gradients(self, gradients: Sequence[Tensor], of_result: Tensor, of_state: Tensor) -> Tensor:
        """Write those of q, k, v, g and beta into *gradients*, of their shapes.

        Args:
            gradients: Where to.
            of_result: The gradient of the result, ``(batch, tokens, heads, value channels)``.
            of_state: That of the state after the last chunk.

        Returns:
            That of the state before the first chunk.
        """
        of_result, before = self._chunked(of_result, of_state), self.states[:-1]
        of_missing, after = self._scan_back(of_result, of_state)
        less_reads, of_system = of_missing @ before.mT, (of_missing @ self.writes.mT).neg_().tril_(-1)
        of_beta = _dot(of_missing, self.v) - _dot(less_reads, self.read_k) + _dot(of_system, self.pairs.kk)
        of_qk = of_result @ self.writes.mT
        of_q, of_k, of_written, of_g = self.pairs.gradients(of_qk, of_system * self.beta)
        # Of what the tokens read of the state before, of what they write into the state after, and of what of it stays.
        of_read_q, less_read_k = (of_result @ before.mT).mul_(self.since), less_reads.mul_(self.beta * self.since)
        of_written_k = (self.writes @ after[1:].mT).mul_(self.until)
        reading = (self.q * of_read_q).addcmul_(self.k, less_read_k, value=-1)
        writing = self.k * of_written_k
        staying = ((before * after[1:]).sum(-1, keepdim=True) * self.through).mT
        if not self.form.variant.per_channel:
            reading, writing, staying = (x.sum(-1, keepdim=True) for x in (reading, writing, staying))
        of_g += _from_here(reading) + _until_here(writing) + staying
        of_q += of_read_q
        of_k.sub_(less_read_k).add_(of_written).add_(of_written_k)
        for x, of_x, length, scale in zip((self.q, self.k), (of_q, of_k), self.lengths, self.scales, strict=True):
            if self.form.normalised:
                of_x.addcmul_(x, _dot(x, of_x), value=-(length**-2))
            of_x.mul_(scale)
        for gradient, found in zip(gradients, (of_q, of_k, of_missing.mul_(self.beta), of_g, of_beta), strict=True):
            self._into(gradient if gradient.dim() == 4 else gradient.unsqueeze(-1), found)
        return after[0]

    def _scan_back(self, of_result: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of what the inverse is multiplied by, and of the states."""
        of_writes, of_before = self.pairs.qk.mT @ of_result, self.read_q.mT @ of_result
        of_missing, of_states = torch.empty_like(of_writes), torch.empty_like(self.states)
        of_states[-1] = of_state
        for n in reversed(range(len(of_writes))):
            of_write = torch.baddbmm(of_writes[n], self.written_k[n], of_states[n + 1])
            torch.bmm(self.inverse[n].mT, of_write, out=of_missing[n])
            torch.addcmul(of_before[n], of_states[n + 1], self.through[n], out=of_states[n])
            of_states[n].baddbmm_(self.reads[n].mT, of_missing[n], alpha=-1)
        return of_missing, of_states

    def _chunked(self, x: Tensor, state: Tensor) -> Tensor:
        """A copy of *x*, ``(batch, tokens, heads, channels)``, in chunks and in the dtype of *state*.

        There are zeros after the last token; and a key head for each head that it serves.
        """
        padding = -self.tokens % self.chunk
        chunks = state.new_empty((self.tokens + padding) // self.chunk, len(state), self.chunk, x.shape[-1])
        chunks[-1, :, self.chunk - padding :] = 0
        for chunk, part in zip(chunks, torch.split(x, self.chunk, 1), strict=True):
            of_heads = chunk.view(self.batch, x.shape[2], -1, *chunk.shape[1:])
            of_heads[..., : part.shape[1], :] = part.transpose(1, 2).unsqueeze(2)
        return chunks

    def _into(self, x: Tensor, chunks: Tensor) -> None:
        """Write *chunks* into *x*, which lies as what `_chunked` takes: into a key head the sum of those it serves."""
        for part, chunk in zip(torch.split(x, self.chunk, 1), chunks, strict=True):
            of_heads = chunk.view(self.batch, x.shape[2], -1, *chunk.shape[1:])[..., : part.shape[1], :]
            part.copy_((of_heads.sum(2) if of_heads.shape[2] > 1 else of_heads.squeeze(2)).transpose(1, 2))


def _over_length(x: Tensor) -> Tensor:
    squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return squares.add_(EPS).rsqrt_()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _segments(v: Tensor) -> list[slice]:
    """The tokens of each segment of *v*."""
    batch, tokens, heads, _ = v.shape
    step = max(1, _AT_ONCE // (batch * heads * _CHUNK)) * _CHUNK
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _forward(
    form: _Form, needs: Sequence[bool], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    batch, length, heads, values = v.shape
    with standard_state(q.device.type):
        if length == 1 and not needs:
            return _step(form, q, k, v, g, beta, state), ()
        segments = _segments(v)
        shape = (batch * heads, k.shape[-1], values)
        states = q.new_zeros(len(segments) + 1, *shape, dtype=working_dtype(q, k, v, g, beta, state))
        if state is not None:
            states[0] = state.flatten(0, 1)
        result = torch.empty_like(v, dtype=q.dtype, memory_format=torch.contiguous_format)
        for n, tokens in enumerate(segments):
            segment = _Segment(form, states[n], *(x[:, tokens] for x in (q, k, v, g, beta)))
            segment.write_result(result[:, tokens])
            states[n + 1] = segment.states[-1]
        return (result, states[-1].view(batch, heads, *shape[1:]).clone()), (states[:-1],)


def _step(
    form: _Form, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token, as in decoding: the formula, in as few passes over the state as it can do with."""
    dtype, wide = q.dtype, working_dtype(q, k, v, g, beta, state)
    q, k, v, g, beta = (x.to(wide).transpose(1, 2) for x in (q, k, v, g, beta))
    if form.normalised:
        q, k = (x * _over_length(x) for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q * q.shape[-1] ** -0.5, k))
    decay = (g if form.variant.per_channel else g.unsqueeze(-1)).exp().mT
    state = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state * decay
    state.addcmul_(k.mT, (v - k @ state) * beta.unsqueeze(-1))
    return (q @ state).transpose(1, 2).to(dtype).contiguous(), state


def _backward(
    form: _Form, needs: Sequence[bool], of_result: Tensor, of_state: Tensor, states: Tensor, *tensors: Any
) -> list[Tensor]:
    *inputs, state = tensors
    with standard_state(of_result.device.type):
        gradients = [torch.empty_like(x) for x in inputs]
        running = of_state.flatten(0, 1)
        for n, tokens in reversed([*enumerate(_segments(inputs[2]))]):
            segment = _Segment(form, states[n], *(x[:, tokens] for x in inputs))
            running = segment.write_gradients([x[:, tokens] for x in gradients], of_result[:, tokens], running)
        if state is not None:
            gradients.append(running.view(state.shape).to(state.dtype))
    return [gradient for gradient, need in zip(gradients, needs, strict=False) if need]


def _formula(form: _Form, *tensors: Any) -> tuple[Tensor, Tensor]:
    return reference.compute(*form, *tensors)


_in_chunks = differentiable(_forward, _backward, _formula, plain)
