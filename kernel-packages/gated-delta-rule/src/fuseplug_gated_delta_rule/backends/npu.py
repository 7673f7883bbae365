"""The gated delta rule on Ascend NPUs: in chunks, by operations of torch, with few launches of large tensors.

Nothing here imports torch_npu: a tensor on an NPU means that torch_npu is loaded. Nothing waits for the device.
Everything is computed in float32, with matmuls that `torch.npu.matmul.allow_hf32` does not round unless somebody turns
that on.

Each chunk adds one launch to the forward, and one to the backward. With the names of `chunked`, let
``W = M⁻¹ β e^G k``, ``K = e^(G_last - G) k`` and ``A = e^(G_last) - Kᵀ W``. Then the state after a chunk is
``A S + Kᵀ M⁻¹ β v``, and the gradient of the state before it is ``Aᵀ`` times that of the state after it, plus what the
results add. The matrices A of all chunks are computed at once.

A call of one segment of n chunks, without an initial state, takes 79 + n launches if heads have decays, and 128 + n if
channels have; with the backward of its result, 228 + 3 n and 405 + 3 n.

The inverse takes 18 launches of matmuls and operations between them, so that nothing depends on how a release of CANN
solves triangular systems.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain_floating

from .. import reference
from ..reference import Variant, working_dtype
from .chunked import in_chunks
from .segment import Form, Segment


class NpuSegment(Segment):
    """A few chunks, with one launch to go from each to the next; 2048 tokens of 16 heads at once."""

    at_once = 1 << 15

    def _inverse(self, system: Tensor) -> Tensor:
        """The inverses of the unit lower triangular matrices with *system* below the diagonal.

        If two blocks on the diagonal have the known inverses A and C, and B is below the first, the inverse has
        ``-C B A`` in the place of B. So the inverted blocks become twice as large each time, from one row on.
        """
        shape, system = system.shape, system.flatten(0, 1)
        first, *others = _below_blocks(self.chunk, system.device)
        inverse = torch.eye(self.chunk, dtype=system.dtype, device=system.device) - system * first
        for below in others:
            inverse = torch.baddbmm(inverse, torch.bmm(inverse, system * below), inverse, alpha=-1)
        return inverse.view(shape)

    def _scan(self, state: Tensor) -> None:
        self.read_q, self.read_k, self.written_k = self.q * self.since, self.k * self.since, self.k * self.until
        self.solved_k = self.inverse @ (self.read_k * self.beta)
        writes = self.inverse @ (self.v * self.beta)
        self.onward = (self.written_k.mT @ self.solved_k).neg_()
        self.onward.diagonal(dim1=-2, dim2=-1).add_(self.through.squeeze(-1))
        added = self.written_k.mT @ writes
        self.states = state.new_empty(len(added) + 1, *state.shape)
        self.states[0] = state
        for n, onward in enumerate(self.onward):
            torch.baddbmm(added[n], onward, self.states[n], out=self.states[n + 1])
        self.writes = _add_matmul(writes, self.solved_k, self.states[:-1], alpha=-1)

    def _scan_back(self, of_result: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor]:
        of_writes = self.pairs.qk.mT @ of_result
        added = _add_matmul(self.read_q.mT @ of_result, self.solved_k.mT, of_writes, alpha=-1)
        of_states = torch.empty_like(self.states)
        of_states[-1] = of_state
        for n in reversed(range(len(added))):
            torch.baddbmm(added[n], self.onward[n].mT, of_states[n + 1], out=of_states[n])
        return self.inverse.mT @ _add_matmul(of_writes, self.written_k, of_states[1:], alpha=1), of_states


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

    The reference computes calls in float64, with empty tensors or inside ``torch.compile``, and calls for tracers,
    functorch transforms and tensor subclasses. Nothing looks for logarithms of decays above 0, because the host would
    have to wait: those of channels may overflow.
    """
    tensors = (q, k, v, g, beta, initial_state)
    if not plain_floating(*tensors) or working_dtype(*tensors) is not torch.float32:
        return by_reference(reference.compute, variant, normalised, *tensors)
    return _in_chunks(Form(variant, normalised), *tensors)


gated_delta_rule = computed_by(compute, reference.gated_delta_rule)

_in_chunks = in_chunks(NpuSegment)


@functools.cache
def _below_blocks(rows: int, device: torch.device) -> tuple[Tensor, ...]:
    """Masks for blocks of 1, 2, 4, … *rows*: 1 below the first of each two on the diagonal, and 0 elsewhere."""
    at = torch.arange(rows, device="cpu")
    below, size = [], 1
    while size < rows:
        block = at // size
        pairs = (block.unsqueeze(1) == block + 1) & (block % 2 == 0)
        below.append(pairs.float().to(device))
        size *= 2
    return tuple(below)


def _add_matmul(x: Tensor, a: Tensor, b: Tensor, *, alpha: float) -> Tensor:
    """``x + alpha · a b``, in the memory of *x*, ``(chunks, heads, rows, columns)``."""
    x.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), alpha=alpha)
    return x
