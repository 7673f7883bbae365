"""Launches that go past Triton's JIT, which takes most of a small call's time on the host."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernel import interpreted


def cached_launches(function: Any) -> Any:
    """Have *function*, which ``triton.jit`` made, started without its JIT where it was started so before.

    In the interpreter, and on the GPUs of AMD and Intel, it stays *function*: theirs are compiled for more than is
    looked at here, such as the size of the memory behind a pointer.
    """
    others = torch.version.hip or getattr(torch.version, "xpu", None)
    return function if interpreted() or others else _CachedLaunches(function)


class _CachedLaunches:
    """Started as *fn* is: ``[grid](*pointers, *others, **options)``. *grid* is a tuple; a pointer may be None.

    For each launch the JIT asks what a program is compiled for: the type of each argument, whether a pointer is aligned
    to 16 bytes, whether an integer is 1 or divisible by 16. Here the values themselves are the key, which takes less;
    and a program is compiled from its key alone, so it depends on nothing else. Pointers that are not aligned have
    none. Of Triton's knobs only the hooks of launches have an effect on what was started before they were set.
    """

    def __init__(self, fn: Any) -> None:
        from triton.runtime import driver

        self.fn = fn
        self._driver = driver
        self._names = [*inspect.signature(fn.fn).parameters]
        # By type too: 1, 1.0 and True are one key of a dict, and are compiled differently.
        self._compiled = functools.lru_cache(maxsize=1024, typed=True)(self._compile)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if len(arguments) < len(self._names):  # what is compiled knows no names
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
        """What starts the program; a dtype in *key* stands for an aligned pointer, as it does for `warmup`."""
        start: Callable[..., None] = self.fn.warmup(*key, grid=grid, **options)[(*grid, 1, 1)]
        return start
