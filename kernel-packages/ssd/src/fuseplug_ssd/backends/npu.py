"""The recurrence of Mamba-2 on Ascend NPUs, in chunks, by operations of torch: few launches on large tensors.

Nothing here imports torch_npu: a tensor on an NPU means that it is loaded. Nothing waits for the device. Everything is
computed in float32; matmuls round their inputs only if somebody turns on `torch.npu.matmul.allow_hf32`.

The number of launches does not depend on the number of chunks. All chunks are computed at once, and one matmul with the
decays between every two chunks gives the states before each. A call of one segment of whole chunks, with D and a bias
and without initial states, makes 34 launches, or 114 with the backward of its result. A last chunk that is not whole
adds 15 or 38.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain_floating

from .. import reference
from ..reference import Step, working_dtype
from .chunked import in_chunks
from .segment import Segment


class NpuSegment(Segment):
    """Several chunks, computed at once: 32 if there are 64 heads, and never more than 64."""

    at_once = 1 << 23
    most_chunks = 64

    def _decay(self, logarithms: Tensor) -> None:
        self.decays = _between(logarithms)
        sums = logarithms.cumsum(-1)
        self.since, self.until = sums.exp(), self.decays[..., -1, :]
        self._through = sums[..., -1].view(-1, self.batch * self.heads)

    def scan(self, state: Tensor) -> Tensor:
        """As `Segment.scan`, but for all chunks at once."""
        added = self._room(state, 0)
        written = self._by_token(self.dt_x * self.until.unsqueeze(-1))
        torch.bmm(written.mT, self.B, out=added[1:].view(len(self.x), -1, self.states))
        states = _carried(self._across(), added)
        self.before = states[:-1].view(len(self.x), -1, self.states)
        return states[-1].view(state.shape)

    def _scan_back(self, read: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor]:
        added = self._room(of_state, -1)
        torch.bmm(read.mT, self.C, out=added[:-1].view(self.before.shape))
        of_states = _carried(self._across().mT, added)
        return of_states[1:].view(self.before.shape), of_states[0].view(of_state.shape)

    def _across(self) -> Tensor:
        """The decays between every two of the states before each chunk and after the last."""
        return _between(functional.pad(self._through.mT, (1, 0)))

    def _room(self, state: Tensor, place: int) -> Tensor:
        """Memory for what is added to the states before each chunk and after the last, with *state* at *place*."""
        added = state.new_empty(self.chunks + 1, self.batch * self.heads, self.width * self.states)
        added[place] = state.reshape(added.shape[1:])
        return added


def compute(step: Step, *tensors: Any) -> tuple[Tensor, Tensor]:
    """`fuseplug_ssd.reference.ssd` in chunks: the same arguments, results and errors.

    The reference computes calls in float64, of empty tensors or of tensor subclasses, and calls inside
    ``torch.compile``, tracers and functorch transforms.
    """
    if not plain_floating(*tensors) or working_dtype(*tensors) is not torch.float32:
        return by_reference(reference.compute, step, *tensors)
    return _in_chunks(step, *tensors)


ssd = computed_by(compute, reference.ssd)

_in_chunks = in_chunks(NpuSegment)


def _between(logarithms: Tensor) -> Tensor:
    """The decay from each token s to each token l, ``(..., l, s)``; 0 if s is later than l.

    The decay is ``e^`` the sum of *logarithms*, ``(..., tokens)``, after s up to l. All addends have one sign, so the
    error is a few roundings of this sum. A difference of two sums from the beginning would have the roundings of those
    larger sums.
    """
    tokens = logarithms.shape[-1]
    sums = logarithms.unsqueeze(-1).expand(*logarithms.shape, tokens).tril(-1).cumsum(-2)
    return sums.masked_fill_(_later(tokens, sums.device), -math.inf).exp_()


@functools.cache
def _later(tokens: int, device: torch.device) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool, device="cpu").triu_(1).to(device)


def _carried(decays: Tensor, added: Tensor) -> Tensor:
    """The matmul of *decays*, ``(heads, chunks + 1, chunks + 1)``, with *added*, ``(chunks + 1, heads, states)``."""
    return torch.bmm(decays, added.transpose(0, 1)).transpose(0, 1).contiguous()
