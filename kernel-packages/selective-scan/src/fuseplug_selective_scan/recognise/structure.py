"""Finds selective scans among the functions that the methods of a module look up."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseplug import Example, Proposal, Rejection, Site, Target
from fuseplug_backends.dtypes import MODEL_DTYPES, usual_mixes
from fuseplug_backends.looked_up import looked_up, positional_parameters

from .adapters import ScanAdapter, StepAdapter

_PARAMETERS = ("A", "B", "C", "D", "z", "delta_bias", "delta_softplus", "return_last_state")
"""The parameters after x and dt in the signature of a selective scan."""

_STEP_PARAMETERS = ("A", "B", "C", "D", "dt_bias", "dt_softplus", "z")
"""The parameters after the state, x and dt in the signature of a function for one token that writes into the state."""

_CHOICES = ("use_mambapy", "use_associative_scan")
"""Parameters that choose how the original computes. Without the package mambapy, the first changes nothing."""

_ROUNDINGS = 8.0
"""The sum of dt and its bias, and the softplus of this sum, which both enter the decay and the written values; then the
state that is read, the values read from it, and the gate. The gradient goes back the same way."""

_WORKING_ROUNDINGS = 16.0 + 3 * 3.0
"""Sixteen for the arithmetic, and √n / 4 for each of three sums over tokens; n is 148 in the largest check. A result is
a sum over the tokens before it, its gradient goes back the same way, and the gradient of A, D or the bias is a sum
over all tokens."""

_LARGE = 1 << 10
"""Elements from which on an example has more channels and states."""


class ScanMix(NamedTuple):
    """One combination to check.

    Attributes:
        x: The dtype of x, dt, B, C and z.
        continued: Whether the call asks for the last state.
        bare: Whether the call has neither a gate nor a bias nor a softplus, and not the module's `_CHOICES`. It always
            has a skip: without one, the original's result has the dtype of autocast, and no known model lacks it.
    """

    x: torch.dtype
    continued: bool = False
    bare: bool = False


class StepMix(NamedTuple):
    """One combination to check for one token.

    Attributes:
        x: The dtype of x, dt, B, C and z.
        D: The dtype of D.
        bare: Whether the call has neither a bias nor a softplus.
    """

    x: torch.dtype
    D: torch.dtype
    bare: bool = False


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Propose to replace each function that a method looks up and that has the signature of a selective scan.

    A function for one token counts only in a module that also looks up a scan, because Mamba-2's function for one token
    has the same signature.
    """
    module = site.module
    if next(module.children(), None) is None:
        return None
    targets = dict(looked_up(type(module), scans))
    if not targets:
        return _written_out(module)
    own = next((parameter.dtype for parameter in module.parameters() if parameter.dim() == 2), torch.float32)
    for function in targets.values():
        _ask(function)
    whole = [_proposal(site, own, target, positional_parameters(function)) for target, function in targets.items()]
    return whole + [_step_proposal(own, target) for target, _ in looked_up(type(module), steps)]


def _written_out(module: torch.nn.Module) -> Rejection | None:
    A_log = getattr(module, "A_log", None)
    # An A_log of one dimension belongs to another recurrence of the same family.
    if callable(getattr(module, "slow_forward", None)) and isinstance(A_log, Tensor) and A_log.dim() > 1:
        return Rejection(
            "its selective scan is written out in its forward, as in transformers 4.57; what is replaced is a function "
            "that a method looks up, as in transformers 5.23"
        )
    return None


def scans(value: object) -> bool:
    """Whether *value* is a function with the signature of a selective scan."""
    return isinstance(value, types.FunctionType) and positional_parameters(value)[2:10] == _PARAMETERS


def steps(value: object) -> bool:
    """Whether *value* is a function with the signature of a selective scan for one token."""
    return isinstance(value, types.FunctionType) and positional_parameters(value)[3:10] == _STEP_PARAMETERS


def _ask(function: Callable[..., Any]) -> None:
    """Call the memoised functions without parameters that *function* uses, such as those that look for a package.

    *function* calls them every time. The reader takes a memoised answer for a constant, but runs nothing to get one.
    """
    plain: Any = inspect.unwrap(function)
    for name in plain.__code__.co_names:
        question = plain.__globals__.get(name)
        if hasattr(question, "cache_info") and not inspect.signature(question).parameters:
            question()


def _proposal(site: Site, own: torch.dtype, target: Target, parameters: Sequence[str]) -> Proposal:
    dtypes = sorted(MODEL_DTYPES, key=lambda dtype: dtype is not own)
    mixes = [ScanMix(dtype, continued) for dtype in dtypes for continued in (False, True)]
    mixes.append(ScanMix(own, bare=True))
    return Proposal(
        target=target,
        adapters=(ScanAdapter(),),
        # A module with these attributes calls the function with them.
        example=functools.partial(
            _example, {name: bool(getattr(site.module, name, False)) for name in _CHOICES if name in parameters}
        ),
        mixes=mixes,
        likely=usual_mixes(mixes, site.device_type),
        roundings=_ROUNDINGS,
        working_roundings=_WORKING_ROUNDINGS,
        exact=False,
    )


def _step_proposal(own: torch.dtype, target: Target) -> Proposal:
    pairs = [(dtype, dtype) for dtype in MODEL_DTYPES] + [(dtype, torch.float32) for dtype in MODEL_DTYPES[:2]]
    mixes = [StepMix(*pair) for pair in sorted(pairs, key=lambda pair: pair != (own, own))]
    mixes.insert(1, mixes[0]._replace(bare=True))
    return Proposal(
        target=target,
        adapters=(StepAdapter(),),
        example=_step_example,
        mixes=mixes,
        likely=[mix for mix in mixes[1:] if mix == StepMix(torch.bfloat16, torch.float32)],
        roundings=_ROUNDINGS,
        working_roundings=_WORKING_ROUNDINGS,
        exact=False,
    )


def _example(choices: Mapping[str, bool], mix: ScanMix, size: int, generator: torch.Generator) -> Example:
    """A call as mixers make it, with the shapes of `fuseplug_selective_scan.reference.selective_scan`.

    Steps times A are between a hundredth and about ten.
    """
    channels, states = (6, 4) if size < _LARGE else (16, 8)
    # The original's backward takes four times as long for twice the tokens.
    tokens = 10 + min(64, size // (2 * channels))
    shape = (max(2, size // (tokens * channels)), channels, tokens)
    x, dt, A, B, C, D, z, bias = _inputs(mix.x, shape, states, generator)
    return Example(
        [x, dt.abs() / 2 if mix.bare else dt, A, B, C],
        kwargs={
            "D": D,
            **({"z": None, "delta_bias": None} if mix.bare else {"z": z, "delta_bias": bias}),
            "delta_softplus": not mix.bare,
            "return_last_state": mix.continued,
            # The original's branches must be taken both ways.
            **{name: choice is not mix.bare for name, choice in choices.items()},
        },
    )


def _step_example(mix: StepMix, size: int, generator: torch.Generator) -> Example:
    """A call as mixers make it in decoding: the state before, and arguments without the dimension of the tokens."""
    channels, states = (6, 4) if size < _LARGE else (16, 8)
    batch = max(2, size // (channels * states))
    inputs = _inputs(mix.x, (batch, channels, 1), states, generator)
    state = torch.randn(batch, channels, states, generator=generator, dtype=torch.float32, device="cpu")
    x, dt, A, B, C, D, z, bias = (tensor.squeeze(-1) for tensor in inputs)
    rest = {"D": D.to(mix.D), "dt_bias": None if mix.bare else bias, "dt_softplus": not mix.bare, "z": z}
    return Example([state, x, dt.abs() / 2 if mix.bare else dt, A, B, C], kwargs=rest)


def _inputs(dtype: torch.dtype, shape: tuple[int, int, int], states: int, generator: torch.Generator) -> list[Tensor]:
    """x, dt, A, B, C, D, z, delta_bias for ``(batch, channels, tokens)``; channels are adjacent in all but dt."""
    batch, channels, tokens = shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    def by_token(width: int) -> Tensor:
        return normal(batch, tokens, width).to(dtype).transpose(1, 2)

    x, B, C, z = (by_token(width) for width in (channels, states, states, channels))
    dt, A = normal(batch, channels, tokens).to(dtype), -normal(channels, states).exp()
    D, delta_bias = normal(channels), normal(channels)
    return [x, dt, A, B, C, D, z, delta_bias]
