"""A table of the activations that models write, for every op that has one. All backends read it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["ACTIVATIONS", "Activation"]


@dataclass(frozen=True)
class Activation:
    """One activation as models write it. Two rows may be the same function of real numbers, but round differently.

    Attributes:
        function: Takes the input and swish's beta, which only ``"swish"`` uses.
        formula: The name of the function of real numbers: ``"swish"`` is ``x · σ(βx)``, ``"gelu"`` is ``x · Φ(x)``,
            ``"gelu_tanh"`` its approximation by tanh. A backend computes all rows with one formula in the same way, and
            declines a formula that it does not know.
        code_names: Names of which the code of a model with this activation contains at least one.
        beta: For ``"swish"``, its β; ``None`` if the caller gives it.
        native: Whether it is a single operation of torch.
        autocast: Whether autocast around the call changes it: on CUDA, autocast computes a power in float32.
    """

    function: Callable[[Tensor, float], Tensor]
    formula: str
    code_names: frozenset[str]
    beta: float | None = 1.0
    native: bool = False
    autocast: bool = False

    def steepness(self, beta: float) -> float:
        """The β that a call with the argument *beta* uses."""
        return beta if self.beta is None else self.beta


def _gelu_new(x: Tensor, _beta: float) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_fast(x: Tensor, _beta: float) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


def _gelu_erf(x: Tensor, _beta: float) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _names(*names: str) -> frozenset[str]:
    return frozenset(names)


def _swish(x: Tensor, beta: float) -> Tensor:
    # Do not multiply by 1: if x has gaps in memory, the product has none, and without AVX-512 torch's sigmoid then
    # rounds differently. The types are a tuple because Dynamo does not know unions before torch 2.10.
    return x * torch.sigmoid(x if isinstance(beta, (float, int)) and beta == 1 else x * beta)


ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation(lambda x, _: functional.silu(x), "swish", _names("silu"), native=True),
    "gelu": Activation(lambda x, _: functional.gelu(x), "gelu", _names("gelu"), native=True),
    "gelu_tanh": Activation(
        lambda x, _: functional.gelu(x, approximate="tanh"), "gelu_tanh", _names("gelu"), native=True
    ),
    "relu": Activation(lambda x, _: functional.relu(x), "relu", _names("relu"), native=True),
    "relu2": Activation(lambda x, _: torch.square(functional.relu(x)), "relu2", _names("relu"), autocast=True),
    "gelu_new": Activation(_gelu_new, "gelu_tanh", _names("tanh"), autocast=True),
    "gelu_fast": Activation(_gelu_fast, "gelu_tanh", _names("tanh")),
    "gelu_erf": Activation(_gelu_erf, "gelu", _names("erf")),
    "quick_gelu": Activation(lambda x, _: x * torch.sigmoid(1.702 * x), "swish", _names("sigmoid"), beta=1.702),
    "swish": Activation(_swish, "swish", _names("sigmoid"), beta=None),
    "sigmoid": Activation(lambda x, _: torch.sigmoid(x), "sigmoid", _names("sigmoid", "glu"), native=True),
}
"""Every activation by name, the likely ones first. ``gelu_new`` and ``gelu_tanh`` differ in their roundings."""
