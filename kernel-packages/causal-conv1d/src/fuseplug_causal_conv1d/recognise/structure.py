"""Finds causal convolutions in the functions that the methods of a module look up."""

from __future__ import annotations

import functools
import math
import types
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fuseplug import Consent, Example, Proposal, Rejection, Site, Target, called_functions
from fuseplug_backends.dtypes import MODEL_DTYPES, usual_mixes
from fuseplug_backends.looked_up import calls_by_name, looked_up, methods_of, positional_parameters

from ..reference import VARIANTS
from .adapters import ConvolutionAdapter

_PARAMETERS = ("weight", "bias", "activation")
"""The parameters after the input in the signature of a causal convolution."""

_DELTA_RULE = ("query", "key", "value", "g", "beta")
"""The first parameters of a gated delta rule, which follows the convolution in a layer."""

_CONSENT = Consent(
    "packed_sequences",
    "packed sequences are computed one by one; transformers raises an error for them, so nothing can be compared",
)

_BATCH, _SMALL_CHANNELS, _SHORT = 2, 6, 2
_LARGE = 1 << 10
"""The number of elements from which on an example has as many channels as the module."""

_MOST_ELEMENTS_CHECKED = 1 << 18
"""The largest size at which a kernel here is checked."""

_ROUNDINGS = 4.0
"""The sum, the activation and their derivatives may each be rounded to the dtype of the result."""


class ConvolutionMix(NamedTuple):
    """One combination to check: the dtypes of x and of the weight, and whether x is shorter than the weight."""

    x: torch.dtype
    weight: torch.dtype
    short: bool = False


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Propose a causal convolution for each function ``(x, weight, bias, activation)`` that a method looks up.

    The module holds the weights of a depthwise `nn.Conv1d`, which it never calls: it passes them to the functions.
    """
    module = site.module
    convolution = _causal_convolution(module)
    if convolution is None:
        return None
    targets = [target for target, _ in looked_up(type(module), convolves)]
    if not targets:
        return Rejection(
            "its causal convolution is written out, as nn.Conv1d, a slice and an activation; what is replaced is a "
            "function (x, weight, bias, activation) that a method looks up, as in transformers 5.23"
        )
    # The proposals for packed sequences come first: with the user's consent, they are taken.
    packed = [target for target in targets if tells_of_packed_sequences(type(module), target)]
    return [
        _proposal(site, convolution, target, packed=packs)
        for packs, some in ((True, packed), (False, targets))
        for target in some
    ]


def _causal_convolution(module: nn.Module) -> nn.Conv1d | None:
    """The child with the weights of a causal convolution: one filter for each channel, padded by its width less one."""
    for child in module.children():
        if isinstance(child, nn.Conv1d) and child.groups == child.in_channels == child.out_channels > 1:
            width = child.kernel_size[0]
            if width > 1 and child.padding in ((width - 1,), width - 1) and child.stride == child.dilation == (1,):
                return child
    return None


def convolves(value: object) -> bool:
    """Whether *value* is a function with the signature of a causal convolution."""
    return isinstance(value, types.FunctionType) and positional_parameters(value)[1:4] == _PARAMETERS


def tells_of_packed_sequences(cls: type, target: Target) -> bool:
    """Whether the method of *target* passes its further keywords to the convolution and to each delta rule.

    A delta rule that is told of packed sequences keeps them apart, or raises an error. Other functions that mix tokens,
    such as the scan of Mamba, are not told: with them, the sequences would mix after the convolution.
    """
    method = methods_of(cls)[target.method]
    rules = called_functions(method, _is_delta_rule)
    if not rules:
        return False
    calls = [calls_by_name(method).get(name, ()) for name in (*rules, target.function or "")]
    return all(calls) and all(any(item.arg is None for item in call.keywords) for some in calls for call in some)


def _is_delta_rule(value: object) -> bool:
    return isinstance(value, types.FunctionType) and positional_parameters(value)[:5] == _DELTA_RULE


def _proposal(site: Site, convolution: nn.Conv1d, target: Target, *, packed: bool) -> Proposal:
    names = [value for name, value in vars(site.module).items() if "act" in name and isinstance(value, str)]
    mixes = _mixes(site.module, convolution)
    return Proposal(
        target=target,
        adapters=tuple(ConvolutionAdapter(variant, packed) for variant in VARIANTS),
        example=functools.partial(
            _example, convolution.out_channels, convolution.kernel_size[0], convolution.bias is not None, names[:1]
        ),
        mixes=mixes,
        likely=[mix for mix in usual_mixes(mixes, site.device_type) if mix.weight is mixes[0].weight and not mix.short],
        roundings=_ROUNDINGS,
        working_roundings=_working_roundings(convolution.out_channels),
        consent=_CONSENT if packed else None,
    )


def _mixes(module: nn.Module, convolution: nn.Conv1d) -> tuple[ConvolutionMix, ...]:
    """Every combination to check, the module's own first. Some modules keep only these weights in float32."""
    weight = convolution.weight.dtype
    inputs = (child.weight.dtype for child in module.children() if isinstance(child, nn.Linear))
    own = (next(inputs, weight), weight)
    pairs = [(dtype, dtype) for dtype in MODEL_DTYPES] + [(dtype, torch.float32) for dtype in MODEL_DTYPES[:2]]
    mixes = [ConvolutionMix(*pair) for pair in sorted(pairs, key=lambda pair: pair != own)]
    return (*mixes, mixes[0]._replace(short=True))


def _working_roundings(channels: int) -> float:
    """Sixteen for the arithmetic, and those of the sum over all tokens that is the gradient of a weight.

    Adding *n* terms one after the other ends about √n / 5 roundings away from their sum.
    """
    return 16.0 + math.sqrt(_MOST_ELEMENTS_CHECKED / channels) / 4


def _example(
    channels: int,
    width: int,
    has_bias: bool,
    activation: list[str],
    mix: ConvolutionMix,
    size: int,
    generator: torch.Generator,
) -> Example:
    """An input ``(batch, channels, tokens)`` in a projection's layout, with channels side by side; weights; a bias.

    Below `_LARGE` elements, there are a few channels instead of the module's.
    """
    channels = _SMALL_CHANNELS if size < _LARGE else channels

    def normal(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    tokens = _SHORT if mix.short else max(width + 3, -(-size // (_BATCH * channels)))
    x = normal(_BATCH, tokens, channels, dtype=mix.x).transpose(1, 2)
    weight = normal(channels, width, dtype=mix.weight)
    bias = normal(channels, dtype=mix.weight) if has_bias else None
    return Example([x, weight, bias], kwargs={"activation": activation[0]} if activation else {})
