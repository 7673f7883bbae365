"""The adapter: it calls the kernel in place of a module's own gating. The projections stay modules, and are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuseplug import Adapter, Compute


class Beside(Protocol):
    """A step beside the op, on ``(..., width)`` of any floating dtype; it keeps the shape."""

    @property
    def reads(self) -> tuple[str, ...]:
        """The names that the step reads from the module, as `fuseplug.Adapter.reads`."""

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Take the step."""


@dataclass(frozen=True)
class CallChild:
    """Call the child with this name."""

    child: str
    reads: tuple[str, ...] = ()

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Take the step."""
        result: Tensor = getattr(module, self.child)(x)
        return result


@dataclass(frozen=True)
class Drop:
    """Apply dropout, with the probability that the module holds under this name."""

    probability: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The probability."""
        return (self.probability,)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Take the step."""
        return functional.dropout(x, p=getattr(module, self.probability), training=module.training)


@dataclass(frozen=True)
class Multiply:
    """Multiply by the number or parameter that the module holds under this name."""

    factor: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The factor."""
        return (self.factor,)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Take the step."""
        result: Tensor = x * getattr(module, self.factor)
        return result


@dataclass(frozen=True)
class CastTo:
    """Cast to the dtype of this child's weight, unless that is quantised to int8, as models do that keep it wide."""

    child: str

    @property
    def reads(self) -> tuple[str, ...]:
        """The weight."""
        return (f"{self.child}.weight",)

    def __call__(self, module: nn.Module, x: Tensor) -> Tensor:
        """Take the step."""
        weight = getattr(module, self.child).weight
        if isinstance(weight, Tensor) and weight.dtype not in (x.dtype, torch.int8):
            return x.to(weight.dtype)
        return x


@dataclass(frozen=True)
class GatedAdapter(Adapter):
    """Calls a module's projections, and the op between them, with the values that the module holds at the time.

    Attributes:
        activation: A key of `fuseplug_backends.activations.ACTIVATIONS`.
        gate: Name of the projection that gives the gate, or gate and up in one.
        up: Name of the projection that gives up; ``None`` if *gate* gives both.
        down: Name of the projection that follows; ``None`` if the module has none.
        up_called_first: Whether *up* is called before *gate*. Both may draw random numbers, as LoRA's dropout does.
        form: A key of `fuseplug_swiglu.reference.VARIANTS`.
        layout: One of `fuseplug_swiglu.reference.LAYOUTS`; without meaning if there is an *up*.
        numbers: Arguments of the op, and the names under which the module holds them.
        before: The steps on the input.
        between: The steps between the op and *down*.
        after: The steps on the result.
        variant: The activation, form and layout in a few words.
    """

    activation: str
    gate: str
    up: str | None
    down: str | None
    up_called_first: bool = False
    form: str = "plain"
    layout: str = "gate-first"
    numbers: tuple[tuple[str, str], ...] = ()
    before: tuple[Beside, ...] = ()
    between: tuple[Beside, ...] = ()
    after: tuple[Beside, ...] = ()
    variant: str = field(init=False, default="")

    def __post_init__(self) -> None:
        words = [self.activation]
        words += [self.form] if self.form != "plain" else []
        words += [self.layout] if self.up is None else []
        object.__setattr__(self, "variant", " ".join(words))

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of the op's numbers, and the names that the steps read."""
        steps = (name for step in (*self.before, *self.between, *self.after) for name in step.reads)
        return (*(name for _, name in self.numbers), *steps)

    @property
    def children_called(self) -> tuple[str, ...]:
        """The children that the steps call."""
        return tuple(step.child for step in (*self.before, *self.between, *self.after) if isinstance(step, CallChild))

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, hidden_states)``.

        ``hidden_states`` is ``(..., hidden)``, of any floating dtype that the projections take. The result is that of
        the last projection, ``(..., its width)``. Errors are those of the projections and of `reference.swiglu`.
        """
        if self.numbers or self.before or self.between or self.after or self.down is None or self.up_called_first:
            return self._bind_with_steps(compute)
        activation, variant, layout = self.activation, self.form, self.layout
        gate_name, up_name, down_name = self.gate, self.up, self.down

        # Lean: most models use one of these two functions, and for a single token the caller waits for it.
        def separate(module: nn.Module, hidden_states: Tensor) -> Any:
            gate = getattr(module, gate_name)(hidden_states)
            up = getattr(module, str(up_name))(hidden_states)
            return getattr(module, down_name)(compute(gate, up, activation=activation, variant=variant))

        def in_one(module: nn.Module, hidden_states: Tensor) -> Any:
            gate_up = getattr(module, gate_name)(hidden_states)
            y = compute(gate_up, None, activation=activation, variant=variant, layout=layout)
            return getattr(module, down_name)(y)

        return in_one if up_name is None else separate

    def _bind_with_steps(self, compute: Compute) -> Callable[..., Any]:
        adapter = self

        def forward(module: nn.Module, hidden_states: Tensor) -> Any:
            x = hidden_states
            numbers = {argument: getattr(module, name) for argument, name in adapter.numbers}
            for step in adapter.before:
                x = step(module, x)
            gate, up = adapter._project(module, x)
            x = compute(gate, up, activation=adapter.activation, variant=adapter.form, layout=adapter.layout, **numbers)
            for step in adapter.between:
                x = step(module, x)
            if adapter.down is not None:
                x = getattr(module, adapter.down)(x)
            for step in adapter.after:
                x = step(module, x)
            return x

        return forward

    def _project(self, module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.up is None:
            return getattr(module, self.gate)(x), None
        if self.up_called_first:
            up = getattr(module, self.up)(x)
            return getattr(module, self.gate)(x), up
        return getattr(module, self.gate)(x), getattr(module, self.up)(x)
