"""The recurrence of Mamba-2 by operations of PyTorch, forward and backward in time and memory linear in the tokens.

Tokens are computed in chunks. The arguments and the states before each chunk are kept for the backward, which computes
everything else anew. A segment class says how many chunks and sequences are computed at once, and how the states go
from chunk to chunk.

A call of one token without gradients is a decoding step, which has its own function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseplug_backends.differentiating import differentiable
from fuseplug_backends.inductor import plain, standard_state

from .. import reference
from ..reference import Step, working_dtype
from .segment import CHUNK, Inputs, Segment

_BY_TOKEN = ("x", "dt", "B", "C")
"""Arguments whose gradients are not sums over tokens."""


def in_chunks(segment: type[Segment]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the differentiable function of a backend from its segment class.

    Returns:
        ``function(step, *tensors)``, with the arguments and results of `fuseplug_ssd.reference.compute`. The tensors
        must be floating, not empty, and on one device.
    """
    forward, backward = (functools.partial(function, segment) for function in (_forward, _backward))
    function: Callable[..., tuple[Tensor, Tensor]] = differentiable(forward, backward, reference.compute, plain)
    return function


def _parts(segment: type[Segment], x: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Each group of sequences, with the tokens of every segment."""
    batch, tokens, heads, _ = x.shape
    of_chunk = heads * CHUNK * min(tokens, CHUNK)
    chunks = max(1, min(segment.most_chunks, segment.at_once // of_chunk, -(-tokens // CHUNK)))
    rows, size = max(1, segment.at_once // (of_chunk * chunks)), chunks * CHUNK
    for start in range(0, batch, rows):
        yield slice(start, start + rows), [slice(first, min(first + size, tokens)) for first in range(0, tokens, size)]


def _of_part(inputs: Inputs, sequences: slice, tokens: slice) -> Inputs:
    parts = {name: x[sequences, tokens] if name in _BY_TOKEN else x for name, x in inputs._asdict().items()}
    return Inputs(**parts)


def _chunks(tokens: slice) -> slice:
    return slice(tokens.start // CHUNK, -(-tokens.stop // CHUNK))


def _forward(
    segment: type[Segment], step: Step, needs: Sequence[bool], *tensors: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    *rest, initial_states = tensors
    inputs, dtype = Inputs(*rest), working_dtype(*tensors)
    x = inputs.x
    with standard_state(x.device.type):
        if x.shape[1] == 1 and not needs:
            return _step(step, dtype, inputs, initial_states), ()
        result = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        states = x.new_zeros(x.shape[0], *x.shape[2:], inputs.B.shape[3], dtype=dtype)
        if initial_states is not None:
            states.copy_(initial_states)
        before = states.new_empty(-(-x.shape[1] // CHUNK) if needs else 0, *states.shape)
        for sequences, segments in _parts(segment, x):
            for tokens in segments:
                some = segment(step, _of_part(inputs, sequences, tokens), dtype)
                after = some.scan(states[sequences])
                if needs:
                    kept = before[_chunks(tokens), sequences]
                    kept.copy_(some.before.view(kept.shape))
                some.write(result[sequences, tokens], some.result())
                # Only now: some.before may be a view of these states.
                states[sequences] = after
    return (result, states), (before,)


def _backward(
    segment: type[Segment],
    step: Step,
    needs: Sequence[bool],
    of_result: Tensor,
    of_states: Tensor,
    before: Tensor,
    *tensors: Any,
) -> list[Tensor]:
    *rest, initial_states = tensors
    inputs = Inputs(*rest)
    wanted = [name for name, need in zip(Inputs._fields, needs, strict=False) if need]
    gradients = {name: torch.empty_like(getattr(inputs, name)) for name in wanted if name in _BY_TOKEN}
    of_states = of_states.clone(memory_format=torch.contiguous_format)
    with standard_state(of_result.device.type):
        for sequences, segments in _parts(segment, inputs.x):
            for tokens in reversed(segments):
                some = segment(step, _of_part(inputs, sequences, tokens), before.dtype)
                some.before = before[_chunks(tokens), sequences].reshape(len(some.x), -1, some.states)
                of_part, of_states[sequences] = some.gradients(of_result[sequences, tokens], of_states[sequences])
                for name in wanted:
                    if name in _BY_TOKEN:
                        place = gradients[name][sequences, tokens]
                        some.write(place if place.dim() == 4 else place.unsqueeze(-1), of_part[name])
                    else:
                        # Gradients that are sums accumulate in the dtype of the computation.
                        gradients[name] = gradients[name] + of_part[name] if name in gradients else of_part[name]
    results = [gradients[name].to(getattr(inputs, name).dtype) for name in wanted]
    return [*results, of_states.to(initial_states.dtype)] if needs[-1] else results


def _step(step: Step, dtype: torch.dtype, inputs: Inputs, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The formula for one token, in as few passes over the states as possible."""
    x, dt, B, C = (tensor.to(dtype) for tensor in (inputs.x, inputs.dt, inputs.B, inputs.C))
    (batch, _, groups, states), shape = B.shape, (len(x), *x.shape[2:], B.shape[3])
    dt = step.size(dt if inputs.dt_bias is None else dt + inputs.dt_bias)
    written = (x * dt.unsqueeze(-1)).reshape(batch * groups, -1, 1)
    B, C = (tensor.reshape(batch * groups, 1, states) for tensor in (B, C))
    if state is None:
        last = written * B
    else:
        decays = (dt * inputs.A).exp_().view(*shape[:2], 1, 1)
        last = (state * decays).reshape(batch * groups, -1, states).addcmul_(written, B)
    # torch.bmm is slower if its right operand has a single column.
    y = torch.bmm(C, last.mT).view(x.shape)
    return y if inputs.D is None else y.addcmul_(x, inputs.D.to(dtype).unsqueeze(-1)), last.view(shape)
