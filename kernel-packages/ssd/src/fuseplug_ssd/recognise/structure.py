"""Finds chunk scans among the functions that the methods of a module look up."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug import Example, Proposal, Rejection, Site, Target
from fuseplug_backends.dtypes import MODEL_DTYPES, usual_mixes
from fuseplug_backends.looked_up import looked_up, positional_parameters

from .adapters import ChunkScanAdapter, StepAdapter

_PARAMETERS = (
    *("A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states"),
    *("dt_softplus", "dt_limit", "return_final_states"),
)
"""The parameters after x and dt in the signature of a chunk scan."""

_STEP_PARAMETERS = ("A", "B", "C", "D", "dt_bias", "dt_softplus", "z")
"""The parameters after the states, x and dt in the signature of a function for one token, which writes the states."""

_ROUNDINGS = 8.0
"""The sum of dt and its bias, and the softplus of this sum, which both enter the decay and the written values. The
gradient goes back the same way. A decoding step has no gradient. It rounds the written values twice more, the states
that are read, the values read from them, and its skip and gate twice each."""

_WORKING_ROUNDINGS = 16.0 + 3 * 4.0
"""Sixteen for the arithmetic, and √n / 4 for each of three sums over tokens; n is 266 in the largest check of a model.
A result is a sum over the tokens before it, its gradient goes back the same way, and the gradient of A, D or the bias
is a sum over all tokens."""

_CHUNK = 16
"""Tokens of a chunk of the original in the examples that are varied: its work grows with the square of this number."""

Make = Callable[..., Example]
"""The type of `Proposal.example`."""

_LARGE = 1 << 10
"""Elements from which on an example has more heads and states, and several chunks of a kernel."""


class ScanMix(NamedTuple):
    """One combination to check.

    Attributes:
        x: The dtype of x, dt, B and C.
        D: The dtype of D and dt_bias, which are parameters.
        continued: Whether the call has initial states and asks for the last states.
        bare: Whether the call has neither a skip nor a bias nor a softplus, and limits the steps.
        chunk_size: Tokens of a chunk of the original.
        prefill: Whether the call asks for the last states, and has no initial ones.
    """

    x: torch.dtype
    D: torch.dtype
    continued: bool = False
    bare: bool = False
    chunk_size: int = _CHUNK
    prefill: bool = False


class StepMix(NamedTuple):
    """One combination to check for one token.

    Attributes:
        x: The dtype of x, dt, B, C and z.
        D: The dtype of D and dt_bias, which are parameters.
        gated: Whether the call has a gate, as that of a Falcon-H1 without norms.
        bare: Whether the call has no softplus. No model makes such a call, so no kernel is run in it; but the branches
            of the original must be taken both ways.
    """

    x: torch.dtype
    D: torch.dtype
    gated: bool = False
    bare: bool = False


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Propose to replace each function that a method looks up and that has the signature of a chunk scan.

    A function for one token counts only in a module that also looks up a chunk scan, because Mamba's function for one
    token has the same signature.
    """
    module = site.module
    if next(module.children(), None) is None:
        return None
    targets = dict(looked_up(type(module), chunk_scans))
    if not targets:
        return _written_out(module)
    dtype = next((parameter.dtype for parameter in module.parameters() if parameter.dim() == 2), torch.float32)
    # A module with these attributes calls the function with them.
    chunk_size, dt_limit = (getattr(module, name, None) for name in ("chunk_size", "time_step_limit"))
    example = functools.partial(_example, (0.0, float("inf")) if dt_limit is None else dt_limit)
    whole = [_proposal(site, dtype, chunk_size or _CHUNK, target, example) for target in targets]
    return whole + [_step_proposal(site, dtype, target) for target, _ in looked_up(type(module), steps)]


def _written_out(module: torch.nn.Module) -> Rejection | None:
    A_log = getattr(module, "A_log", None)
    # An A_log of two dimensions belongs to another recurrence of the same family.
    if callable(getattr(module, "torch_forward", None)) and isinstance(A_log, Tensor) and A_log.dim() == 1:
        return Rejection(
            "its chunk scan is written out in its forward, as in transformers 4.57; what is replaced is a function "
            "that a method looks up, as in transformers 5.23"
        )
    return None


def chunk_scans(value: object) -> bool:
    """Whether *value* is a function with the signature of a chunk scan."""
    return isinstance(value, types.FunctionType) and positional_parameters(value)[2:] == _PARAMETERS


def steps(value: object) -> bool:
    """Whether *value* is a function with the signature of the recurrence for one token."""
    return isinstance(value, types.FunctionType) and positional_parameters(value)[3:10] == _STEP_PARAMETERS


def _proposal(site: Site, own: torch.dtype, chunk_size: int, target: Target, example: Make) -> Proposal:
    dtypes = sorted(MODEL_DTYPES, key=lambda dtype: dtype is not own)
    pairs = dict.fromkeys([*((dtype, dtype) for dtype in dtypes), *((dtype, torch.float32) for dtype in dtypes)])
    mixes = [ScanMix(own, own)]
    mixes += [ScanMix(*pair, continued, chunk_size=chunk_size) for pair in pairs for continued in (False, True)]
    # In float32 and chunks of 256, transformers' gradient of A is 1.3 times as far from the truth here as is allowed.
    half = torch.bfloat16 if own is torch.float32 else own
    mixes += [ScanMix(half, own, chunk_size=chunk_size, prefill=True), ScanMix(own, own, bare=True)]
    return Proposal(
        target=target,
        adapters=(ChunkScanAdapter(),),
        example=example,
        mixes=mixes,
        likely=[mix for mix in usual_mixes(mixes, site.device_type) if mix.D is own],
        roundings=_ROUNDINGS,
        working_roundings=_WORKING_ROUNDINGS,
        exact=False,
    )


def _step_proposal(site: Site, own: torch.dtype, target: Target) -> Proposal:
    pairs = [(dtype, dtype) for dtype in MODEL_DTYPES] + [(dtype, torch.float32) for dtype in MODEL_DTYPES[:2]]
    pairs.sort(key=lambda pair: pair != (own, own))
    mixes = [*(StepMix(*pair, gated) for pair in pairs for gated in (False, True)), StepMix(own, own, bare=True)]
    return Proposal(
        target=target,
        adapters=(StepAdapter(),),
        example=_step_example,
        mixes=mixes,
        likely=[mix for mix in usual_mixes(mixes, site.device_type) if mix.D is own and not mix.bare],
        roundings=_ROUNDINGS,
        working_roundings=_WORKING_ROUNDINGS,
        exact=False,
    )


def _example(dt_limit: Any, mix: ScanMix, size: int, generator: torch.Generator) -> Example:
    """A call as mixers make it, longer than a chunk, with the shapes of `fuseplug_ssd.reference.ssd`."""
    tokens = 10 + (mix.chunk_size if size < _LARGE else max(mix.chunk_size, 138))
    groups, per_group, width, states = sizes = _sizes(size)
    batch = max(2, size // (tokens * groups * per_group * width))
    x, dt, A, B, C, D, dt_bias = _inputs(mix.x, mix.D, (batch, tokens), sizes, generator)
    rest = {"D": D, "dt_bias": dt_bias}
    return Example(
        [x, dt.abs() / 2 if mix.bare else dt, A, B, C],
        kwargs={
            "chunk_size": mix.chunk_size,
            **(dict.fromkeys(rest) if mix.bare else rest),
            "initial_states": _normal(generator, batch, len(D), width, states) if mix.continued else None,
            "dt_softplus": not mix.bare,
            "dt_limit": (0.125, 0.625) if mix.bare else dt_limit,
            "return_final_states": mix.continued or mix.prefill,
        },
    )


def _step_example(mix: StepMix, size: int, generator: torch.Generator) -> Example:
    """A call as mixers make it in decoding: tensors with one number for each head are expanded."""
    groups, per_group, width, states = sizes = _sizes(size)
    shape = (max(5, size // (groups * per_group * width * states)), groups * per_group, width)
    x, dt, A, B, C, D, dt_bias = _inputs(mix.x, mix.D, (shape[0], 1), sizes, generator)
    x, dt, B, C = (tensor.squeeze(1) for tensor in (x, dt, B, C))
    state, z = _normal(generator, *shape, states), _normal(generator, *shape).to(mix.x)
    dt, D, dt_bias = (tensor.unsqueeze(-1).expand(*tensor.shape, width) for tensor in (dt, D, dt_bias))
    return Example(
        [state, x, dt.abs() / 2 if mix.bare else dt, A.view(-1, 1, 1).expand(*shape[1:], states), B, C, D],
        kwargs={"z": z if mix.gated else None, "dt_bias": dt_bias, "dt_softplus": not mix.bare},
    )


def _sizes(size: int) -> tuple[int, int, int, int]:
    """The groups, heads of a group, width and states of an example of *size*."""
    return (2, 3, 3, 4) if size < _LARGE else (2, 4, 4, 8)


def _inputs(
    dtype: torch.dtype,
    of_D: torch.dtype,
    shape: tuple[int, int],
    sizes: tuple[int, int, int, int],
    generator: torch.Generator,
) -> list[Tensor]:
    """x, dt, A, B, C, D and dt_bias for ``(batch, tokens)``.

    x, B and C are parts of one tensor, as in models. Steps times A are between a hundredth and about ten: some heads
    forget slowly, so that the gradients of A, each a sum over all tokens, do not all cancel.
    """
    groups, per_group, width, states = sizes
    heads = groups * per_group
    mixed = _normal(generator, *shape, heads * width + 2 * groups * states).to(dtype)
    x, B, C = torch.split(mixed, [heads * width, groups * states, groups * states], -1)
    dt = _normal(generator, *shape, heads).to(dtype)
    D, dt_bias = (_normal(generator, heads).to(of_D) for _ in range(2))
    A = -(torch.linspace(-2, 2, heads, device="cpu") + _normal(generator, heads) / 4).exp()
    B, C = (tensor.view(*shape, groups, states) for tensor in (B, C))
    return [x.view(*shape, heads, width), dt, A, B, C, D, dt_bias]


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
