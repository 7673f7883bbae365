"""Some chunks of tokens of Mamba-2's recurrence, forward and backward."""

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
    """The tensors among the arguments, or parts of them, as the reference takes them, without the states before."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None


class Segment:
    """Some chunks of tokens: what forward and backward both compute of them.

    Let a be the sums of the logarithms ``dt A`` since a chunk began, and h the states before it. Then its result is
    ``(C Bᵀ ∘ e^(a_l - a_s)) (dt x) + e^a C h``, with pairs of a token l and an earlier one s, or itself; and the states
    after it are ``e^(a_last) h + (e^(a_last - a) dt x)ᵀ B`` (Dao & Gu 2024, arXiv:2405.21060, section 6). No factor is
    the inverse of a decay. All heads of a group share ``C Bᵀ``.

    Tensors are ``(groups, heads of a group, tokens, width)`` or ``(groups, tokens, states)``, in the dtype in which
    everything is computed, where groups are those of all chunks and of the whole batch, and tokens are those of a
    chunk. States are ``(groups, heads of a group × width, states)``.

    Args:
        step: How the size of a step is made.
        inputs: The arguments for its tokens: a chunk or less, or several whole chunks.
        dtype: In which everything is computed.

    Attributes:
        before: The states before each chunk: `scan` finds them, or whoever has kept them sets them.
        at_once: How many sequences × heads × pairs of tokens are computed at once: for CPUs so few that tensors of that
            shape stay in the cache, 2 MiB each.
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
        """Find the decays of pairs of tokens; of each token since its chunk began, and until it ends."""
        # In float64, so that the rounding of a difference is that of the difference and not of the sums; to that end
        # no decay is stronger than one that leaves nothing.
        sums = logarithms.double().clamp_(min=_NOTHING).cumsum(-1)
        self.decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).to(self.dtype).exp_().tril_()
        self.since, self.until = (t.to(self.dtype).exp() for t in (sums, sums[..., -1:] - sums))

    def write(self, into: Tensor, tensor: Tensor) -> None:
        """Write *tensor*, as most of what is here lies, into one of the shape ``(batch, tokens, heads, width)``."""
        for part, of_chunks in self._parts(into, tensor):
            part.copy_(of_chunks)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """The other way round, with zeros after the last token."""
        heads, width = tensor.shape[2:]
        shape = (self.chunks * self.batch * self.groups, heads // self.groups, self.tokens, width)
        copy = self._within(torch.empty(shape, dtype=self.dtype, device=tensor.device))
        for part, of_chunks in self._parts(tensor, copy):
            of_chunks.copy_(part)
        return copy

    def _parts(self, tensor: Tensor, by_head: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The whole chunks, and the tokens after them: of *tensor* ``(chunks, batch, heads, tokens, width)``.

        And the same of *by_head*.
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
        """*tensor*, by head, with zeros after the last token."""
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
        """What *by*, B or C, reads of *states*, by head."""
        return (by @ states.mT).view(len(by), self.tokens, -1, self.width).transpose(1, 2)

    def scan(self, state: Tensor) -> Tensor:
        """Find the states before each chunk.

        Args:
            state: ``(batch, heads, width, states)`` before the first.

        Returns:
            The states after the last, of the same shape.
        """
        self.before = state.reshape(len(self.x), -1, self.states)
        written = self._by_token(self.dt_x * self.until.unsqueeze(-1))
        return self._scaled(self.before).baddbmm_(written.mT, self.B).view(state.shape)

    def _scan_back(self, read: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the states after each chunk, and of those before the first.

        Args:
            read: What of the gradient of the result goes to the states before each chunk, with C.
            of_state: The gradient of the states after the last chunk, ``(batch, heads, width, states)``.
        """
        of_after = of_state.reshape(self.before.shape)
        return of_after, self._scaled(of_after).baddbmm_(read.mT, self.C).view(of_state.shape)

    def _scaled(self, states: Tensor) -> Tensor:
        """*states*, decayed through a chunk."""
        return states * self.since[..., -1:].repeat_interleave(self.width, 1)

    def result(self) -> Tensor:
        """The result, for `write`."""
        y = self.weights @ self.dt_x
        y.addcmul_(self._read(self.before, self.C), self.since.unsqueeze(-1))
        return y if self.D is None else self._of_all(y).addcmul_(self._of_all(self.x), self.D)

    def gradients(self, of_result: Tensor, of_state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The gradients of the inputs by name, for `write` or in their shapes; and that of the states before.

        Args:
            of_result: ``(batch, tokens, heads, width)``.
            of_state: ``(batch, heads, width, states)``, of the states after the last chunk.
        """
        of_y = self._by_head(of_result)
        read = self._by_token(of_y * self.since.unsqueeze(-1))
        written = self._by_token(self.dt_x * self.until.unsqueeze(-1))
        of_after, of_before = self._scan_back(read, of_state)
        of_weights = of_y @ self.dt_x.mT
        of_scores = (of_weights * self.decays).sum(1)
        of_written = self._read(of_after, self.B) * self.until.unsqueeze(-1)
        of_dt_x = (self.weights.mT @ of_y).add_(of_written)
        # Of dt A: what decays between each pair, what is read of the states before, what is written into those after.
        # All that is added is; a difference of sums over rows and columns would lose what is small.
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
        """The gradients of dt with its bias, from those of the sizes of the steps."""
        with torch.enable_grad():
            sums = self._sums.detach().requires_grad_()
            size = self._step.size(sums)
        return torch.autograd.grad(size, sums, of_dt)[0]

    def _over_tokens(self, tensor: Tensor) -> Tensor:
        """The sums of *tensor*, by head, over batch and tokens: ``(heads,)``."""
        return self._of_all(tensor).sum((0, 2))


@functools.cache
def _triangles(tokens: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """1 where the column is a token up to that of the row, and where it is one after it; 0 elsewhere."""
    ones = torch.ones(tokens, tokens, dtype=dtype, device="cpu")
    return ones.tril().to(device), ones.triu(1).to(device)
