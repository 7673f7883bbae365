"""What a replacement stands for, and for which calls."""

from __future__ import annotations

from dataclasses import dataclass

from ..contract import Target
from ..verification import NOTHING, ById, Call, Dtypes, Extra, Route, Watch


@dataclass(frozen=True)
class Mark:
    """Identifies a replacement as ours, so that it is recognised everywhere, also in copies of models."""

    kernel_id: str
    variant: str
    target: Target
    device_type: str


@dataclass(frozen=True)
class Accepts:
    """The calls that were verified. Every other call goes to the original.

    Attributes:
        calls: The ways in which it was called.
        main: Which argument is the main input.
        typed: The tensors whose dtypes count: arguments by number, others by where they are below the module.
        dtypes: Their dtypes, in each combination that was verified.
        watch: What else must be unchanged.
        extra: What becomes of keyword arguments that the original has no parameters for.
        space: For a function target, where the name is looked up, if it is known.
    """

    calls: tuple[Call, ...]
    main: int
    typed: tuple[int | Route, ...]
    dtypes: tuple[Dtypes, ...]
    watch: Watch = NOTHING
    extra: Extra = "original"
    space: ById | None = None
