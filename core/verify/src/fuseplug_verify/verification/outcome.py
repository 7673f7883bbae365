"""The results of a run, and how they differ from those of another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

Judge = Callable[[str, Tensor, Tensor], str]

GRADIENT = "gradient of "
"""The prefix of the names of gradients."""


@dataclass(frozen=True)
class Outcome:
    """Everything that one run produced, by name: outputs, gradients (``None`` where there is none), inputs afterwards.

    These are the tensors themselves, not copies: if a later run writes into them, that shows.

    Attributes:
        values: The tensors.
        structure: What the outputs were in, and their types: nothing, a list, a tuple with a ``None``, …
        steps: The strides of each output; ``None`` if it is empty, or skips or repeats memory.
        written: The names of the inputs afterwards whose numbers have changed, such as those of a state.
    """

    values: dict[str, Tensor | None]
    structure: str = ""
    steps: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    written: frozenset[str] = frozenset()

    def difference(self, expected: Outcome) -> str:
        """The first difference from *expected*, bit for bit; ``""`` if there is none."""

        def bits(name: str, value: Tensor, other: Tensor) -> str:
            if same(value, other):
                return ""
            gap = (value.double() - other.double()).abs().nan_to_num(nan=float("inf")).max()
            return f"{name} differs by up to {gap:.3g}"

        return self.judged(expected, bits)

    def judged(self, expected: Outcome, judge: Judge) -> str:
        """The first difference in kind, or the first that *judge* finds in tensors alike in kind; ``""`` if none.

        Args:
            expected: The outcome of the original.
            judge: Says what is wrong with a tensor, given its name, the tensor and the expected one, both on the CPU.
        """
        if missing := [name for name in expected.values if name not in self.values]:
            return f"gives no {', '.join(missing)}"
        if added := [name for name in self.values if name not in expected.values]:
            return f"gives {', '.join(added)}, which the original does not"
        if self.structure != expected.structure:
            return f"returns {self.structure:.200} instead of {expected.structure:.200}"
        values = self.on_cpu()
        for name, other in expected.on_cpu().items():
            value = values[name]
            if value is None or other is None:
                # No gradient and a gradient without elements are the same to code that adds it up.
                if value is not other and (value if other is None else other).numel():  # type: ignore[union-attr]
                    return f"{name} is {_shape(value)} instead of {_shape(other)}"
            elif (value.shape, value.dtype) != (other.shape, other.dtype):
                return f"{name} is {_shape(value)} instead of {_shape(other)}"
            elif why := judge(name, value, other):
                return why
        return ""

    def lies_otherwise(self, expected: Outcome) -> str:
        """The first output that a caller cannot ``view`` in every shape that *expected* allows; else ``""``."""
        for name, steps in expected.steps.items():
            strides = self.steps.get(name)
            if steps is not None and strides != steps:
                return f"{name} lies in memory with strides {strides}, where the original's has {steps}"
        return ""

    def without_gradients(self) -> Outcome:
        """This outcome without the gradients."""
        return replace(self, values={k: v for k, v in self.values.items() if not k.startswith(GRADIENT)})

    def on_cpu(self) -> dict[str, Tensor | None]:
        """The tensors on the CPU, to be compared there."""
        return {name: value if value is None else value.cpu() for name, value in self.values.items()}


def same(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same numbers; every NaN counts as the same."""
    return value.equal(other) or bool(((value == other) | (value.isnan() & other.isnan())).all())


def _shape(value: Tensor | None) -> str:
    return "None" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
