"""Tells errors of originals and kernels from the kit's own errors: only the former are findings.

The kit calls originals, references and kernels through wrappers of its own: under autocast, in a checkpoint, in another
memory layout. If such a wrapper fails, nothing was learned about the wrapped function.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, TypeVar

import torch

from fuseplug_verify import Subject

from .results import Finding

T = TypeVar("T")
_RUN = Subject.run.__code__


class KitError(RuntimeError):
    """The kit itself failed, which says nothing about the kernel."""


def foreign(function: Callable[..., T]) -> Callable[..., T]:
    """*function*, marked as not the kit's: an error that is raised while it runs is not the kit's error."""

    def call_foreign(*args: Any, **kwargs: Any) -> T:
        return function(*args, **kwargs)

    return call_foreign


_MARKS = frozenset({foreign(print).__code__, torch.autograd.grad.__code__})
"""The code under which only foreign code runs: marked functions, and the backward of their results."""

_KIT = str(Path(__file__).parent)
_NOT_ITS = ("torch", "fuseplug", "fuseplug_backends", "fuseplug_testing", "fuseplug_verify")
"""The packages whose code is not the kernel's."""


@dataclass(frozen=True)
class Raised:
    """An error that foreign code raised.

    Attributes:
        error: The error.
        marked: Whether a `foreign` function raised it. Otherwise Fuseplug raised it, using such a function's result.
    """

    error: Exception
    marked: bool

    def __str__(self) -> str:
        return raised(self.error)

    def by_the_original(self, where: str) -> Finding:
        """The finding that the original raises, so that there is nothing to compare with.

        Raises:
            KitError: If no `foreign` function raised the error.
        """
        if not self.marked:
            raise _kit_error(self.error) from self.error
        return Finding(where, skipped=f"the original raises here ({str(self)[:80]})")

    def by_the_kernel(self, where: str) -> Finding:
        """The finding that the kernel raises where the original does not."""
        return Finding(where, fault=f"raises {self}{_line(self.error)}, where the original does not")


def attempt(call: Callable[[], T]) -> T | Raised:
    """The result of *call*, or the error that foreign code raised during it.

    Raises:
        KitError: If the kit raised.
    """
    try:
        return call()
    except KitError:
        raise
    except Exception as error:
        codes = [*_codes(error)]
        marked = not _MARKS.isdisjoint(codes)
        if not marked and _is_of_the_kit(codes):
            raise _kit_error(error) from error
        return Raised(error, marked)


def raised(error: BaseException) -> str:
    """An error in one line."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0][:160]}" if said else type(error).__name__


def _line(error: Exception) -> str:
    """The last line of the kernel's own code that *error* went through; ``""`` if it went through none."""
    frames = traceback.walk_tb(error.__traceback__)
    own = [
        (frame, line) for frame, line in frames if frame.f_globals.get("__name__", "").partition(".")[0] not in _NOT_ITS
    ]
    return f" ({own[-1][0].f_code.co_filename}:{own[-1][1]})" if own else ""


def _codes(error: Exception) -> Iterator[CodeType]:
    return (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))


def _is_of_the_kit(codes: list[CodeType]) -> bool:
    """Whether the kit raised: below `Subject.run`, which the kit calls, a wrapper or the call of a wrapper did."""
    within = codes[codes.index(_RUN) + 1 :] if _RUN in codes else codes
    return not within or any(code.co_filename.startswith(_KIT) for code in within)


def _kit_error(error: Exception) -> KitError:
    return KitError(
        f"the conformance kit itself failed ({raised(error)}), which says nothing about the kernel: report this "
        "with its traceback"
    )
