"""The selective scan by operations of PyTorch, forward and backward in time and memory linear in the number of tokens.

Tokens are computed in chunks, for some sequences and channels at a time, so that all intermediate tensors stay in the
processor's cache. Within a chunk, only ``h ← a h + b`` goes from token to token, with one operation for each token;
everything else is computed for all tokens of the chunk at once.

A call of one token without gradients is a decoding step, which has its own function.

The arguments and the state before each chunk are kept for the backward, which computes everything else anew. Nothing is
compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug.fallback import by_reference
from fuseplug_backends.differentiating import differentiable
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain, plain_floating, standard_state

from ... import reference
from ...reference import result_dtype, working_dtype
from .chunk import Chunk, Inputs

_TOKENS = 32
"""Tokens of a chunk. The kept states take as much memory as ``states / _TOKENS`` tensors of the shape of x."""

_AT_ONCE = 1 << 18
"""How many tokens × sequences × channels × states are computed at once: 1 MiB for each tensor of that shape."""

_BY_TOKEN = ("x", "dt", "z")
"""Arguments whose gradients are not sums over tokens or channels."""


def compute(delta_softplus: bool, *tensors: Any) -> tuple[Tensor, Tensor]:
    """`fuseplug_selective_scan.reference.selective_scan` in chunks: the same arguments, result and errors.

    It computes in float32, even under autocast. Under ``torch.compile``, ``torch.export`` and other tracers, it calls
    the reference.
    """
    if not plain_floating(*tensors):
        return by_reference(reference.compute, delta_softplus, *tensors)
    result: tuple[Tensor, Tensor] = _in_chunks(delta_softplus, *tensors)
    return result


selective_scan = computed_by(compute, reference.selective_scan)


@dataclass(frozen=True)
class _Part:
    """Some sequences and channels of one chunk, which are computed at once."""

    sequences: slice
    channels: slice
    tokens: slice
    chunk: int

    def of(self, inputs: Inputs) -> Inputs:
        """The slices of the arguments that belong to this part."""
        parts: Any = {name: None if x is None else x[self.where(name)] for name, x in inputs._asdict().items()}
        return Inputs(**parts)

    def where(self, name: str) -> tuple[slice, ...]:
        """The indices of this part in the argument *name*, and in the gradient of that argument."""
        if name in ("A", "D", "delta_bias"):
            return (self.channels,)
        return (self.sequences, slice(None) if name in ("B", "C") else self.channels, self.tokens)


def _parts(x: Tensor, states: int) -> Iterator[list[_Part]]:
    """For each group of sequences and channels, the parts of all chunks."""
    batch, channels, tokens = x.shape
    rows = max(1, _AT_ONCE // (min(tokens, _TOKENS) * states))
    chunks = [*enumerate(_slices(tokens, _TOKENS))]
    for sequences in _slices(batch, max(1, rows // channels)):
        for side_by_side in _slices(channels, rows):
            yield [_Part(sequences, side_by_side, of_chunk, number) for number, of_chunk in chunks]


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, length, step)]


def _forward(
    delta_softplus: bool, needs: Sequence[bool], *tensors: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    *arguments, initial_state = tensors
    inputs = Inputs(*arguments)
    x, (channels, states) = inputs.x, inputs.A.shape
    with standard_state(x.device.type):
        if x.shape[2] == 1 and not needs:
            return _step(delta_softplus, working_dtype(*tensors), inputs, initial_state), ()
        result = torch.empty(x.shape, dtype=result_dtype(x, inputs.D, inputs.z), device=x.device)
        last = torch.zeros(x.shape[0], states, channels, dtype=working_dtype(*tensors), device=x.device)
        if initial_state is not None:
            last.copy_(initial_state.mT)
        chunks = -(-x.shape[2] // _TOKENS) if needs else 0
        before = last.new_empty(chunks, *last.shape)
        for parts in _parts(x, states):
            for part in parts:
                state = last[part.sequences, :, part.channels]
                if needs:
                    before[part.chunk, part.sequences, :, part.channels] = state
                chunk = Chunk(delta_softplus, part.of(inputs), state)
                result[part.where("x")] = chunk.result().permute(1, 2, 0)
                state.copy_(chunk.states[-1])
    return (result, last.mT.contiguous()), (before,)


def _backward(
    delta_softplus: bool, needs: Sequence[bool], of_result: Tensor, of_last: Tensor, before: Tensor, *tensors: Any
) -> list[Tensor]:
    *arguments, initial_state = tensors
    inputs = Inputs(*arguments)
    wanted = [name for name, need in zip(Inputs._fields, needs, strict=False) if need]
    # Gradients that are sums accumulate in the dtype of the computation.
    gradients = {
        name: torch.empty_like(x) if name in _BY_TOKEN else torch.zeros_like(x, dtype=before.dtype)
        for name, x in inputs._asdict().items()
        if name in wanted
    }
    of_last = of_last.mT.clone(memory_format=torch.contiguous_format)
    with standard_state(of_result.device.type):
        for parts in _parts(inputs.x, inputs.A.shape[1]):
            for part in reversed(parts):
                of_state = of_last[part.sequences, :, part.channels]
                chunk = Chunk(delta_softplus, part.of(inputs), before[part.chunk, part.sequences, :, part.channels])
                of_part = chunk.gradients(of_result[part.where("x")], of_state)
                of_state.copy_(of_part["state"])
                for name, gradient in gradients.items():
                    place = gradient[part.where(name)]
                    place.copy_(of_part[name]) if name in _BY_TOKEN else place.add_(of_part[name])
    found = [gradients[name].to(getattr(inputs, name).dtype) for name in wanted]
    return [*found, of_last.mT.to(initial_state.dtype)] if needs[-1] else found


def _step(delta_softplus: bool, dtype: torch.dtype, inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The formula for one token, in as few passes over the state as possible."""
    x, dt, B, C = (tensor.to(dtype) for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C))
    dt = dt if inputs.delta_bias is None else dt + inputs.delta_bias.unsqueeze(-1)
    dt = functional.softplus(dt) if delta_softplus else dt
    states = (dt * inputs.A).exp_().mul_(0 if state is None else state).addcmul_(dt * x, B.mT)
    # torch.bmm is three times slower if its right operand has a single column.
    y = torch.bmm(C.mT, states.mT).mT
    y = y if inputs.D is None else y.addcmul_(x, inputs.D.to(dtype).unsqueeze(-1))
    y = y if inputs.z is None else y.mul_(functional.silu(inputs.z.to(dtype)))
    return y.to(result_dtype(inputs.x, inputs.D, inputs.z)), states


_in_chunks = differentiable(_forward, _backward, reference.compute, plain)
