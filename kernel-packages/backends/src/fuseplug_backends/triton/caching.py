"""Launches that bypass Triton's JIT, which takes most of a small call's time on the host."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import interpreted


def cached_launches(function: Any) -> Any:
    """Have *function*, which ``triton.jit`` made, bypass the JIT in launches that are like an earlier one.

    In the interpreter, and on the GPUs of AMD and Intel, return *function* itself: its programs are compiled for more
    than this looks at, such as the size of the memory behind a pointer.
    """
    others = torch.version.hip or getattr(torch.version, "xpu", None)
    return function if interpreted() or others else _CachedLaunches(function)


class _CachedLaunches:
    """Launches *fn*, and is called like it: ``[grid](*pointers, *others, **options)``.

    *grid* is a tuple; a pointer may be None.

    At each launch, the JIT finds out what a program is compiled for: the type of each argument, whether a pointer is
    aligned to 16 bytes, whether an integer is 1 or divisible by 16. Here the values themselves are the key, which takes
    less time. A program is compiled from its key alone, so it depends on nothing else. A launch with unaligned pointers
    has no key. Of Triton's knobs, only launch hooks affect a program that was started before they were set.
    """

    def __init__(self, fn: Any) -> None:
        from triton.runtime import driver

        self.fn = fn
        self._driver = driver
        self._names = [*inspect.signature(fn.fn).parameters]
        # Typed, because 1, 1.0 and True are one key of a dict, but are compiled differently.
        self._compiled = functools.lru_cache(maxsize=1024, typed=True)(self._compile)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if len(arguments) < len(self._names):  # a compiled program knows no names
            arguments += tuple([options.pop(name) for name in self._names[len(arguments) :]])
        dtypes: list[torch.dtype | None] = []
        address = 0
        for argument in arguments:
            if argument is None:
                dtypes.append(None)
            elif isinstance(argument, Tensor):
                dtypes.append(argument.dtype)
                address |= argument.data_ptr()
            else:
                break
        if address % 16 or self.fn.pre_run_hooks:
            self.fn[grid](*arguments, **options)
            return
        active = self._driver.active
        device = active.get_current_device()
        start = self._compiled(device, grid, *dtypes, *arguments[len(dtypes) :], **options)
        start(*arguments, stream=active.get_current_stream(device))

    def _compile(self, _device: int, grid: tuple[int, ...], *key: Any, **options: Any) -> Callable[..., None]:
        """A function that starts the program; a dtype in *key* stands for an aligned pointer, as for `warmup`."""
        start: Callable[..., None] = self.fn.warmup(*key, grid=grid, **options)[(*grid, 1, 1)]
        return start
