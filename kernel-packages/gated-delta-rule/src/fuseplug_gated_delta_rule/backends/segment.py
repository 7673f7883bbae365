"""A few chunks of tokens, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..reference import EPS, Variant
from .pairs import BLOCK, PerChannel, PerHead, from_here, sums_in_parts

CHUNK = 64
"""Tokens of a chunk."""


class Form(NamedTuple):
    """The arguments that are not tensors, in the order of the reference."""

    variant: Variant
    normalised: bool


class Segment:
    """A few chunks: everything that forward and backward both compute for them.

    Tensors are ``(chunks, heads, tokens, channels)``. Heads are those of the whole batch. Tensors with one number for a
    head have one channel.

    Args:
        form: The arguments that are not tensors.
        state: The state before the first chunk, ``(heads, key channels, value channels)``, in the dtype of the
            computation.
        inputs: q, k, v, g and beta of some tokens, as the reference takes them.

    Attributes:
        at_once: How many tokens a segment may have, counted once for each head of the batch: for CPUs, so few that its
            matrices stay in the cache.
    """

    at_once: ClassVar[int] = 1 << 11

    def __init__(self, form: Form, state: Tensor, *inputs: Tensor) -> None:
        q, k, v, g, beta = inputs
        self.form, (self.batch, self.tokens, _, channels) = form, q.shape
        self.chunk = min(CHUNK, -(-self.tokens // BLOCK) * BLOCK)
        self.q, self.k, self.v, self.beta = (self._chunked(x, state) for x in (q, k, v, beta.unsqueeze(-1)))
        self.lengths = (channels**-0.5, 1.0)
        """The lengths of q and k once they are normalised."""
        over = [over_length(x) if form.normalised else 1.0 for x in (self.q, self.k)]
        self.scales = [factor * length for factor, length in zip(over, self.lengths, strict=True)]
        self.q.mul_(self.scales[0])
        self.k.mul_(self.scales[1])
        self._decay(self._chunked(g if form.variant.per_channel else g.unsqueeze(-1), state))
        # The inverse, because a matmul is several times faster than a solver.
        self.inverse = self._inverse(self.pairs.kk * self.beta)
        self._scan(state)

    def _inverse(self, system: Tensor) -> Tensor:
        """The inverses of the unit lower triangular matrices with *system* below the diagonal."""
        one = torch.eye(self.chunk, dtype=system.dtype, device=system.device).expand_as(system)
        inverse: Tensor = torch.linalg.solve_triangular(system, one, upper=False, unitriangular=True)
        return inverse

    def _decay(self, g: Tensor) -> None:
        """Compute each token's decays: in its pairs, since the chunk's start, until its end; and the chunk's own."""
        # Below this, a decay is 0 in this dtype, and a sum would lose what is added to it. Numbers that are not finite
        # give NaN, as in originals.
        least = 1.2 * math.log(torch.finfo(g.dtype).tiny)
        sums = sums_in_parts(g.clamp(min=least).add_(0 * g))
        self.pairs = (PerChannel if self.form.variant.per_channel else PerHead)(sums, self.q, self.k)
        self.since = sums.sum(0).exp_()
        self.until = (sums[..., -1:, :] - sums).sum(0).exp_()
        self.through = self.since[:, :, -1].unsqueeze(-1)

    def _scan(self, state: Tensor) -> None:
        """Compute what each token writes, and the states before each chunk and after the last."""
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
        """Write the gradients of q, k, v, g and beta.

        Args:
            gradients: The tensors to write into, of the shapes of these.
            of_result: The gradient of the result, ``(batch, tokens, heads, value channels)``.
            of_state: The gradient of the state after the last chunk.

        Returns:
            The gradient of the state before the first chunk.
        """
        of_result, before = self._chunked(of_result, of_state), self.states[:-1]
        of_missing, after = self._scan_back(of_result, of_state)
        less_reads, of_system = of_missing @ before.mT, (of_missing @ self.writes.mT).neg_().tril_(-1)
        of_beta = _dot(of_missing, self.v) - _dot(less_reads, self.read_k) + _dot(of_system, self.pairs.kk)
        of_qk = of_result @ self.writes.mT
        of_q, of_k, of_written, of_g = self.pairs.gradients(of_qk, of_system * self.beta)
        # Gradients of what tokens read from the state before and write into the state after, and of what stays of it.
        of_read_q, less_read_k = (of_result @ before.mT).mul_(self.since), less_reads.mul_(self.beta * self.since)
        of_written_k = (self.writes @ after[1:].mT).mul_(self.until)
        reading = (self.q * of_read_q).addcmul_(self.k, less_read_k, value=-1)
        writing = self.k * of_written_k
        staying = ((before * after[1:]).sum(-1, keepdim=True) * self.through).mT
        if not self.form.variant.per_channel:
            reading, writing, staying = (x.sum(-1, keepdim=True) for x in (reading, writing, staying))
        of_g += from_here(reading) + _until_here(writing) + staying
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
        """The gradients of the matrices that the inverse multiplies, and of the states."""
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

        Zeros follow the last token. A key head is repeated for each head that it serves.
        """
        chunks = state.new_empty(-(-self.tokens // self.chunk), len(state), self.chunk, x.shape[-1])
        if rest := self.tokens % self.chunk:
            chunks[-1, :, rest:] = 0
        for part, of_heads in self._parts(x, chunks):
            of_heads.copy_(part.unsqueeze(3))
        return chunks

    def _into(self, x: Tensor, chunks: Tensor) -> None:
        """Write *chunks* into *x*, of the layout that `_chunked` takes: into a key head, the sum of those it serves."""
        for part, of_heads in self._parts(x, chunks):
            part.copy_(of_heads.sum(3) if of_heads.shape[3] > 1 else of_heads.squeeze(3))

    def _parts(self, x: Tensor, chunks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the whole chunks and then the tokens after them, each as parts of *x* and of *chunks*.

        A part of *x* is ``(chunks, batch, heads of x, tokens, channels)``. A part of *chunks* has one more dimension
        before the tokens, of the heads that a head of *x* serves.
        """
        of_heads = chunks.view(len(chunks), self.batch, x.shape[2], -1, *chunks.shape[2:])
        number, rest = divmod(self.tokens, self.chunk)
        if number:
            whole = x[:, : number * self.chunk].view(self.batch, number, self.chunk, *x.shape[2:])
            yield whole.permute(1, 0, 3, 2, 4), of_heads[:number]
        if rest:
            yield x[None, :, number * self.chunk :].transpose(2, 3), of_heads[number:, ..., :rest, :]


def over_length(x: Tensor) -> Tensor:
    """The factor that normalises *x*: one over the root of the sum of its squares over the channels and `EPS`."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return squares.add_(EPS).rsqrt_()


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def _until_here(x: Tensor) -> Tensor:
    """For each token of a chunk, the sum of *x* over all earlier ones."""
    return functional.pad(x[:, :, :-1].cumsum(2), (0, 0, 1, 0))
