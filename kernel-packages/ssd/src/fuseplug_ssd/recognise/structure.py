"""Where chunk scans are found: in the functions that the methods of a module look up."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug import Example, Proposal, Rejection, Site, Target
from fuseplug_backends.dtypes import MODEL_DTYPES
from fuseplug_backends.looked_up import looked_up, positional_parameters

from .adapters import ChunkScanAdapter

_PARAMETERS = (
    *("A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states"),
    *("dt_softplus", "dt_limit", "return_final_states"),
)
"""What follows x and dt in the signature of such a function."""

_ROUNDINGS = 8.0
"""The sum of dt and its bias, and the softplus of that; both go into the decay and into what is written. The gradient
goes the same way back."""

_WORKING_ROUNDINGS = 16.0 + 3 * 4.0
"""Sixteen for the arithmetic. A result is a sum over the tokens before it, its gradient goes the same way back, and the
gradient of A, D or the bias is a sum over all tokens: √n / 4 for each, of the 266 in the largest check of a model."""

_CHUNK = 16
"""Tokens of a chunk of the original, where the example is varied: its work grows with their square."""

_LARGE = 1 << 10
"""Elements from which an example has more heads, and several chunks of a kernel."""


class ScanMix(NamedTuple):
    """One combination to check.

    Attributes:
        x: The dtype of x, dt, B and C.
        D: The dtype of D and dt_bias, which are parameters.
        continued: Whether there are states before, and the last states are asked for.
        bare: Whether there is neither a skip nor a bias nor a softplus, and steps are limited.
        chunk_size: Tokens of a chunk of the original.
    """

    x: torch.dtype
    D: torch.dtype
    continued: bool = False
    bare: bool = False
    chunk_size: int = _CHUNK


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Propose a chunk scan for each function of such a signature that a method looks up."""
    module = site.module
    if next(module.children(), None) is None:
        return None
    targets = dict(looked_up(type(module), chunk_scans))
    if not targets:
        return _written_out(module)
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.dim() == 2), torch.float32)
    # What it calls the function with, if these are its attributes.
    chunk_size, dt_limit = (getattr(module, name, None) for name in ("chunk_size", "time_step_limit"))
    example = functools.partial(_example, (0.0, float("inf")) if dt_limit is None else dt_limit)
    return [_proposal(dtype, chunk_size or _CHUNK, target, example) for target in targets]


def _written_out(module: torch.nn.Module) -> Rejection | None:
    A_log = getattr(module, "A_log", None)
    # Of two dimensions it is another recurrence's, of the same family.
    if callable(getattr(module, "torch_forward", None)) and isinstance(A_log, Tensor) and A_log.dim() == 1:
        return Rejection(
            "its chunk scan is written out in its forward, as in transformers 4.57; what is replaced is a function "
            "that a method looks up, as in transformers 5.23"
        )
    return None


def chunk_scans(value: object) -> bool:
    """Whether *value* has the signature of such a function."""
    return isinstance(value, types.FunctionType) and positional_parameters(value)[2:] == _PARAMETERS


def _proposal(own_dtype: torch.dtype, chunk_size: int, target: Target, example: Callable[..., Example]) -> Proposal:
    dtypes = sorted(MODEL_DTYPES, key=lambda dtype: dtype is not own_dtype)
    pairs = dict.fromkeys([*((dtype, dtype) for dtype in dtypes), *((dtype, torch.float32) for dtype in dtypes)])
    mixes = [ScanMix(own_dtype, own_dtype)]
    mixes += [ScanMix(*pair, continued, chunk_size=chunk_size) for pair in pairs for continued in (False, True)]
    mixes += [ScanMix(dtype, own_dtype, bare=True) for dtype in dtypes]
    return Proposal(
        target=target,
        adapters=(ChunkScanAdapter(),),
        example=example,
        mixes=mixes,
        # Under autocast everything comes in bfloat16.
        likely=tuple(mix for mix in mixes[1:] if mix.D is own_dtype and mix.x in (own_dtype, torch.bfloat16)),
        roundings=_ROUNDINGS,
        working_roundings=_WORKING_ROUNDINGS,
        exact=False,
    )


def _example(dt_limit: Any, mix: ScanMix, size: int, generator: torch.Generator) -> Example:
    """A call as mixers make it, of more than a chunk: shapes are those of `fuseplug_ssd.reference.ssd`.

    Heads lie side by side with what B and C are made of. Steps times A are between a hundredth and some ten: some heads
    forget slowly, so that the gradients of A, each a sum over all tokens, do not all cancel.
    """
    groups, per_group, width, states = (2, 3, 3, 4) if size < _LARGE else (2, 4, 4, 8)
    heads = groups * per_group
    tokens = 10 + (mix.chunk_size if size < _LARGE else max(mix.chunk_size, 138))
    batch = max(2, size // (tokens * heads * width))

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    mixed = normal(batch, tokens, heads * width + 2 * groups * states, dtype=mix.x)
    x, B, C = torch.split(mixed, [heads * width, groups * states, groups * states], -1)
    dt = normal(batch, tokens, heads)
    rest: dict[str, Any] = {"D": normal(heads, dtype=mix.D), "dt_bias": normal(heads, dtype=mix.D)}
    return Example(
        [
            x.view(batch, tokens, heads, width),
            (dt.abs() / 2 if mix.bare else dt).to(mix.x),
            -(torch.linspace(-2, 2, heads, device="cpu") + normal(heads) / 4).exp(),
            B.view(batch, tokens, groups, states),
            C.view(batch, tokens, groups, states),
        ],
        kwargs={
            "chunk_size": mix.chunk_size,
            **(dict.fromkeys(rest) if mix.bare else rest),
            "initial_states": normal(batch, heads, width, states) if mix.continued else None,
            "dt_softplus": not mix.bare,
            "dt_limit": (0.125, 0.625) if mix.bare else dt_limit,
            "return_final_states": mix.continued,
        },
    )
