"""The recurrence of Mamba-2 by operations of PyTorch, forward and backward in time and memory linear in the tokens.

Tokens are computed in chunks, some sequences at a time, so that the matrices of a chunk stay in the processor's cache.
Between forward and backward the arguments are kept, and the states before each chunk. All else is computed anew.
Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.differentiating import differentiable
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain, plain_floating, standard_state

from ... import reference
from ...reference import Step, working_dtype
from .chunk import Chunk, Inputs

_TOKENS = 64
"""Of a chunk."""

_AT_ONCE = 1 << 19
"""Sequences × heads × pairs of tokens of what is computed at once: 2 MiB for each tensor of that shape."""

_BY_TOKEN = ("x", "dt", "B", "C")
"""Arguments whose gradients are no sums over tokens."""


def compute(step: Step, *tensors: Any) -> tuple[Tensor, Tensor]:
    """`fuseplug_ssd.reference.ssd` in chunks: the same arguments, results and errors.

    Matmuls are in float32, under autocast too. For ``torch.compile``, ``torch.export`` and other tracers it *is* the
    reference.
    """
    if not plain_floating(*tensors):
        return by_reference(reference.compute, step, *tensors)
    results: tuple[Tensor, Tensor] = _in_chunks(step, *tensors)
    return results


ssd = computed_by(compute, reference.ssd)


def _parts(x: Tensor) -> Iterator[tuple[slice, list[slice]]]:
    """Some sequences after the others, each time with the tokens of every chunk."""
    batch, tokens, heads, _ = x.shape
    rows = max(1, _AT_ONCE // (heads * _TOKENS * min(tokens, _TOKENS)))
    for start in range(0, batch, rows):
        yield slice(start, start + rows), [slice(first, first + _TOKENS) for first in range(0, tokens, _TOKENS)]


def _of_part(inputs: Inputs, sequences: slice, tokens: slice) -> Inputs:
    parts = {name: x[sequences, tokens] if name in _BY_TOKEN else x for name, x in inputs._asdict().items()}
    return Inputs(**parts)


def _forward(step: Step, needs: Sequence[bool], *tensors: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    *rest, initial_states = tensors
    inputs = Inputs(*rest)
    x, wide = inputs.x, working_dtype(*tensors)
    result = torch.empty_like(x, dtype=wide, memory_format=torch.contiguous_format)
    states = x.new_zeros(x.shape[0], *x.shape[2:], inputs.B.shape[3], dtype=wide)
    if initial_states is not None:
        states.copy_(initial_states)
    before = states.new_empty(-(-x.shape[1] // _TOKENS) if needs else 0, *states.shape)
    with standard_state(x.device.type):
        for sequences, chunks in _parts(x):
            for number, tokens in enumerate(chunks):
                if needs:
                    before[number, sequences] = states[sequences]
                chunk = Chunk(step, _of_part(inputs, sequences, tokens), states[sequences])
                result[sequences, tokens] = chunk.result()
                states[sequences] = chunk.after()
    return (result, states), (before,)


def _backward(
    step: Step, needs: Sequence[bool], of_result: Tensor, of_states: Tensor, before: Tensor, *tensors: Any
) -> list[Tensor]:
    *rest, initial_states = tensors
    inputs = Inputs(*rest)
    wanted = [name for name, need in zip(Inputs._fields, needs, strict=False) if need]
    # Sums are added up in the dtype of the computation.
    gradients = {
        name: torch.empty_like(x) if name in _BY_TOKEN else torch.zeros_like(x, dtype=before.dtype)
        for name, x in inputs._asdict().items()
        if name in wanted
    }
    of_states = of_states.clone(memory_format=torch.contiguous_format)
    with standard_state(of_result.device.type):
        for sequences, chunks in _parts(inputs.x):
            for number, tokens in reversed([*enumerate(chunks)]):
                chunk = Chunk(step, _of_part(inputs, sequences, tokens), before[number, sequences])
                of_part = chunk.gradients(of_result[sequences, tokens], of_states[sequences])
                of_states[sequences] = of_part["state"]
                for name, gradient in gradients.items():
                    if name in _BY_TOKEN:
                        gradient[sequences, tokens] = of_part[name]
                    else:
                        gradient += of_part[name]
    results = [gradients[name].to(getattr(inputs, name).dtype) for name in wanted]
    return [*results, of_states.to(initial_states.dtype)] if needs[-1] else results


_in_chunks = differentiable(_forward, _backward, reference.compute, plain)
