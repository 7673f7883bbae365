"""The recurrence of Mamba-2 on Ascend NPUs: in chunks, by operations of torch, few launches of large tensors.

Nothing here imports torch_npu: tensors on an NPU mean that it is loaded. Nothing waits for the device. Everything is
computed in float32, with matmuls that `torch.npu.matmul.allow_hf32` does not round unless somebody turns that on.

The number of launches does not depend on that of chunks. All are computed at once, and the states before them come of
one matmul, with the decays between each two. A call of one segment of whole chunks, with D and a bias and without
states before, launches 34; with the backward of its result, 114. A last chunk that is not whole adds 15 and 38.
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
    """Some chunks, all at once: 32 of 64 heads, and 64 at most."""

    at_once = 1 << 23
    most_chunks = 64

    def _decay(self, logarithms: Tensor) -> None:
        self.decays = _between(logarithms)
        sums = logarithms.cumsum(-1)
        self.since, self.until = sums.exp(), self.decays[..., -1, :]
        self._through = sums[..., -1].view(-1, self.batch * self.heads)

    def scan(self, state: Tensor) -> Tensor:
        """As `Segment` does it, but for all chunks at once."""
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
        """The decays between the states before each chunk, and after the last."""
        return _between(functional.pad(self._through.mT, (1, 0)))

    def _room(self, state: Tensor, place: int) -> Tensor:
        """For what is added to the states before each chunk, and after the last; *state* is at *place*."""
        added = state.new_empty(self.chunks + 1, self.batch * self.heads, self.width * self.states)
        added[place] = state.reshape(added.shape[1:])
        return added


def compute(step: Step, *tensors: Any) -> tuple[Tensor, Tensor]:
    """`fuseplug_ssd.reference.ssd` in chunks: the same arguments, results and errors.

    For that call it is the reference: of float64; of empty tensors; inside ``torch.compile``, to tracers, functorch
    transforms and subclasses.
    """
    if not plain_floating(*tensors) or working_dtype(*tensors) is not torch.float32:
        return by_reference(reference.compute, step, *tensors)
    return _in_chunks(step, *tensors)


ssd = computed_by(compute, reference.ssd)

_in_chunks = in_chunks(NpuSegment)


def _between(logarithms: Tensor) -> Tensor:
    """The decay of each pair of a token l and an earlier one s, or itself, ``(..., l, s)``; 0 for later ones.

    That is ``e^`` the sum of *logarithms*, ``(..., tokens)``, after s up to l. What is added has one sign, so its error
    is a few roundings of the sum; a difference of two sums from the beginning would have those of the larger ones.
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
