"""The recurrence of Mamba-2 over some chunks of tokens, forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..reference import Step

CHUNK = 64
"""Tokens of a chunk."""

_NOTHING = -1e4
"""The logarithm of a decay that is 0 in every dtype."""


class Inputs(NamedTuple):
    """The tensor arguments without the initial states, or parts of them, in the shapes that the reference takes."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None


class Segment:
    """Some chunks of tokens, with the values that both forward and backward need.

    Let a be the sums of the logarithms ``dt A`` since a chunk began, and h the states before it. Then the result of the
    chunk is ``(C Bᵀ ∘ e^(a_l - a_s)) (dt x) + e^a C h``, where the token s is l or an earlier one, and the states after
    it are ``e^(a_last) h + (e^(a_last - a) dt x)ᵀ B`` (Dao & Gu 2024, arXiv:2405.21060, section 6). No factor is the
    inverse of a decay. All heads of a group share ``C Bᵀ``.

    Tensors lie *by head*: their shape is ``(groups, heads of a group, tokens, width)`` or ``(groups, tokens, states)``,
    with the groups of all chunks and of the whole batch, and with the tokens of one chunk. States are ``(groups, heads
    of a group × width, states)``. All have the dtype of the computation.

    Args:
        step: How to compute the size of a step.
        inputs: The arguments for the tokens of the segment. Only its last chunk may be incomplete.
        dtype: The dtype of the computation.

    Attributes:
        before: The states before each chunk. `scan` computes them; a backward sets the ones that were kept.
        at_once: How many sequences × heads × pairs of tokens are computed at once: for CPUs so few that tensors of that
            shape, 2 MiB each, stay in the cache.
        most_chunks: How many chunks a segment may have.
    """

    before: Tensor
    at_once: ClassVar[int] = 1 << 19
    most_chunks: ClassVar[int] = 1

    def __init__(self, step: Step, inputs: Inputs, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.batch, tokens, self.heads, self.width = inputs.x.shape
        self.tokens = min(tokens, CHUNK)
        self.chunks, self.rest = -(-tokens // self.tokens), tokens % self.tokens
        self.groups, self.states = inputs.B.shape[2:]
        self.x, dt = self._by_head(inputs.x), self._by_head(inputs.dt.unsqueeze(-1)).squeeze(-1)
        self.B, self.C = (self._by_head(tensor).squeeze(1) for tensor in (inputs.B, inputs.C))
        self.A, self.D = (
            inputs.A.to(dtype).unsqueeze(-1),
            None if inputs.D is None else inputs.D.to(dtype).view(-1, 1, 1),
        )
        if inputs.dt_bias is not None:
            dt = self._of_all(dt).add_(inputs.dt_bias.unsqueeze(-1)).view(dt.shape)
        self._step, self._sums, self.dt = step, dt, step.size(dt)
        self.dt_x = self.x * self.dt.unsqueeze(-1)
        self._decay(self._within((self._of_all(self.dt) * self.A).view(dt.shape)))
        self.weights = self.decays * (self.C @ self.B.mT).unsqueeze(1)

    def _decay(self, logarithms: Tensor) -> None:
        """Set the decays between pairs of tokens, from a chunk's start to each token, and from there to its end."""
        # In float64, so that a difference of sums is rounded at its own size and not at theirs. For that, the sums must
        # not grow too large: logarithms are clamped at _NOTHING, below which a decay leaves nothing anyway.
        sums = logarithms.double().clamp_(min=_NOTHING).cumsum(-1)
        self.decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(self.dtype).exp_().tril_()
        self.since, self.until = (t.to(self.dtype).exp() for t in (sums, sums[..., -1:] - sums))

    def write(self, into: Tensor, tensor: Tensor) -> None:
        """Write *tensor*, by head, into a tensor of the shape ``(batch, tokens, heads, width)``."""
        for part, of_chunks in self._parts(into, tensor):
            part.copy_(of_chunks)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(batch, tokens, heads, width)``, by head, with zeros after the last token."""
        heads, width = tensor.shape[2:]
        shape = (self.chunks * self.batch * self.groups, heads // self.groups, self.tokens, width)
        copy = self._within(torch.empty(shape, dtype=self.dtype, device=tensor.device))
        for part, of_chunks in self._parts(tensor, copy):
            of_chunks.copy_(part)
        return copy

    def _parts(self, tensor: Tensor, by_head: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of views of *tensor* and *by_head*: the whole chunks, then the tokens after them.

        Each view is ``(chunks, batch, heads, tokens, width)``.
        """
        of_chunks = by_head.view(self.chunks, self.batch, -1, self.tokens, tensor.shape[3])
        whole = self.chunks - bool(self.rest)
        if whole:
            first = tensor[:, : whole * self.tokens]
            shape = (self.batch, whole, self.tokens, *tensor.shape[2:])
            yield first.view(shape).permute(1, 0, 3, 2, 4), of_chunks[:whole]
        if self.rest:
            yield tensor[None, :, -self.rest :].transpose(2, 3), of_chunks[whole:, ..., : self.rest, :]

    def _within(self, tensor: Tensor) -> Tensor:
        """*tensor*, by head, with zeros written after the last token."""
        if self.rest:
            tensor.view(self.chunks, -1, self.tokens, *tensor.shape[3:])[-1, :, self.rest :] = 0
        return tensor

    def _of_all(self, tensor: Tensor) -> Tensor:
        """A view of *tensor*, by head, in which all heads are one dimension."""
        return tensor.view(-1, self.heads, *tensor.shape[2:])

    def _by_token(self, tensor: Tensor) -> Tensor:
        """*tensor*, by head, as ``(groups, tokens, heads of a group × width)``."""
        return tensor.transpose(1, 2).reshape(len(tensor), self.tokens, -1)

    def _read(self, states: Tensor, by: Tensor) -> Tensor:
        """The values that *by*, B or C, reads from *states*, by head."""
        return (by @ states.mT).view(len(by), self.tokens, -1, self.width).transpose(1, 2)

    def scan(self, state: Tensor) -> Tensor:
        """Compute the states before each chunk.

        Args:
            state: The states before the first chunk, ``(batch, heads, width, states)``.

        Returns:
            The states after the last chunk, in the same shape.
        """
        self.before = state.reshape(len(self.x), -1, self.states)
        written = self._by_token(self.dt_x * self.until.unsqueeze(-1))
        return self._scaled(self.before).baddbmm_(written.mT, self.B).view(state.shape)

    def _scan_back(self, read: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the states after each chunk, and of the states before the first.

        Args:
            read: The gradient of the result, times the decays since the chunk began. Its product with C is the part of
                the gradient of the states before each chunk that comes from reading them.
            of_state: The gradient of the states after the last chunk, ``(batch, heads, width, states)``.
        """
        of_after = of_state.reshape(self.before.shape)
        return of_after, self._scaled(of_after).baddbmm_(read.mT, self.C).view(of_state.shape)

    def _scaled(self, states: Tensor) -> Tensor:
        """*states*, decayed over a whole chunk."""
        return states * self.since[..., -1:].repeat_interleave(self.width, 1)

    def result(self) -> Tensor:
        """The result, for `write`."""
        y = self.weights @ self.dt_x
        y.addcmul_(self._read(self.before, self.C), self.since.unsqueeze(-1))
        return y if self.D is None else self._of_all(y).addcmul_(self._of_all(self.x), self.D)

    def gradients(self, of_result: Tensor, of_state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients of the inputs by name, by head or in the inputs' shapes; and of the states before the segment.

        Args:
            of_result: The gradient of the result, ``(batch, tokens, heads, width)``.
            of_state: The gradient of the states after the last chunk, ``(batch, heads, width, states)``.
        """
        of_y = self._by_head(of_result)
        read = self._by_token(of_y * self.since.unsqueeze(-1))
        written = self._by_token(self.dt_x * self.until.unsqueeze(-1))
        of_after, of_before = self._scan_back(read, of_state)
        of_weights = of_y @ self.dt_x.mT
        of_scores = (of_weights * self.decays).sum(1)
        of_written = self._read(of_after, self.B) * self.until.unsqueeze(-1)
        of_dt_x = (self.weights.mT @ of_y).add_(of_written)
        # The gradient of dt A is a sum over all decays: between pairs of tokens, from the states before to a token or
        # to the states after, and from a token to the states after. Terms are only added, because a difference of sums
        # over rows and columns would lose small values.
        upto, before = _triangles(self.tokens, self.dtype, of_y.device)
        of_logarithms = (upto.mT @ of_weights.mul_(self.weights)).tril_(-1).sum(-1)
        of_read = (of_y * self._read(self.before, self.C)).sum(-1).mul_(self.since)
        of_logarithms += of_read @ upto + (self.dt_x * of_written).sum(-1) @ before
        staying = (of_after * self.before).view(*of_logarithms.shape[:2], -1).sum(-1, keepdim=True)
        of_logarithms = self._within(of_logarithms.addcmul_(staying, self.since[..., -1:]))
        of_dt = (self._of_all(of_logarithms) * self.A).view(self.dt.shape).add_((of_dt_x * self.x).sum(-1))
        of_sums = self._of_sums(of_dt)
        of_x = of_dt_x * self.dt.unsqueeze(-1)
        gradients = {
            "x": of_x,
            "B": (of_scores.mT @ self.C).baddbmm_(written, of_after),
            "C": (of_scores @ self.B).baddbmm_(read, self.before),
            "A": self._over_tokens(of_logarithms * self.dt),
            "dt": of_sums,
            "dt_bias": self._over_tokens(of_sums),
        }
        if self.D is not None:
            gradients["D"] = self._over_tokens((of_y * self.x).sum(-1))
            self._of_all(of_x).addcmul_(self._of_all(of_y), self.D)
        return gradients, of_before

    def _of_sums(self, of_dt: Tensor) -> Tensor:
        """The gradients of the sums of dt and its bias, from the gradients of the step sizes."""
        with torch.enable_grad():
            sums = self._sums.detach().requires_grad_()
            size = self._step.size(sums)
        return torch.autograd.grad(size, sums, of_dt)[0]

    def _over_tokens(self, tensor: Tensor) -> Tensor:
        """The sums of *tensor*, by head, over batch and tokens: ``(heads,)``."""
        return self._of_all(tensor).sum((0, 2))


@functools.cache
def _triangles(tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two matrices of ones and zeros: ones in columns up to the row's token, and in columns after it."""
    ones = torch.ones(tokens, tokens, dtype=dtype, device="cpu")
    return ones.tril().to(device), ones.triu(1).to(device)
