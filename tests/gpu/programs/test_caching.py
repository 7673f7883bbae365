"""A launch that goes past Triton's JIT starts the program that the JIT would start, with the same arguments."""

from __future__ import annotations

import random

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from fuseplug_backends.triton import cached_launches
from fuseplug_testing.triton import compile_only


@triton.jit(do_not_specialize=["free"])
def _scaled(y, x, more, size, free, scale, HALF: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    value = tl.load(x + (at * free).to(tl.int64), mask=at < size) * scale
    if more is not None:
        value += tl.load(more + at)
    tl.store(y + at, value * 0.5 if HALF else value)


@triton.jit
def _product(y, a, b, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(y + at, tl.dot(tl.load(a + at), tl.load(b + at)))


MEMORY = torch.zeros(64)
ALIGNED, OFF, HALVES = MEMORY[4:], MEMORY[1:], MEMORY.bfloat16()
PLAIN = {
    "grid": (1,),
    "y": ALIGNED,
    "x": ALIGNED,
    "more": None,
    "size": 7,
    "free": 7,
    "scale": 0.5,
    "HALF": False,
    "BLOCK": 16,
    "num_warps": 4,
}
WIDE = 1 << 40
DIFFERENT = {
    "grid": [(2,), (2, 3), (1, 2, 3)],
    "y": [OFF, HALVES, HALVES[1:], torch.nn.Parameter(ALIGNED)],
    "x": [OFF, HALVES],
    "more": [ALIGNED, OFF],
    "size": [1, 16, 17, 32, 0, -16, WIDE, WIDE + 1, 1 << 63, 1.0, 16.0, True],
    "free": [1, 16, WIDE, 2.0, True],
    "scale": [1.0, 1, 0, True],
    "HALF": [True],
    "BLOCK": [32],
    "num_warps": [1],
}


@pytest.fixture
def started(monkeypatch):
    """What the driver was asked to start: each program, with all its arguments."""
    found = []

    def launcher(source, metadata):
        about = source.signature, source.constants, source.attrs, metadata.num_warps
        # The description for hooks is left out: it differs from launch to launch.
        return lambda *given: found.append((about, given[:6], *given[7:9], *map(_told, given[9:])))

    with compile_only(90):
        monkeypatch.setattr(driver.active, "launcher_cls", launcher)
        yield found


def _told(argument):
    return (argument.data_ptr(), argument.dtype) if isinstance(argument, torch.Tensor) else (argument, type(argument))


def launch(function, grid, num_warps, **arguments):
    function[grid](*arguments.values(), num_warps=num_warps)


def test_whatever_differs_the_program_is_that_of_the_jit(started):
    calls = [PLAIN, *(PLAIN | {name: value} for name, values in DIFFERENT.items() for value in values)]
    cached = cached_launches(_scaled)
    for _ in range(3):  # each call comes after other calls than before
        random.Random(len(started)).shuffle(calls)
        for call in calls:
            launch(_scaled, **call)
            launch(cached, **call)
            assert started[-1] == started[-2], call
    programs = {str(about) for about, *_ in started}
    assert len(programs) > 20


def test_where_the_jit_is_not_asked_again(started, monkeypatch):
    asked, run = [], type(_scaled).run

    def counted(self, *arguments, **options):
        asked.append(options["warmup"])
        return run(self, *arguments, **options)

    monkeypatch.setattr(type(_scaled), "run", counted)
    cached = cached_launches(_scaled)
    for _ in range(3):
        launch(cached, **PLAIN)
    assert (asked, len(started)) == ([True], 3)
    for _ in range(3):
        launch(cached, **PLAIN | {"x": OFF})
    assert (asked[1:], len(started)) == ([False] * 3, 6)


def test_constants_may_be_given_by_name(started):
    cached = cached_launches(_scaled)
    *given, _, _ = (value for name, value in PLAIN.items() if name not in ("grid", "num_warps"))
    for function in (_scaled, cached, cached):
        function[(1,)](*given, BLOCK=16, HALF=False, num_warps=4)
    assert started[0] == started[1] == started[2]


def test_another_device_has_programs_of_its_own():
    cached = cached_launches(_scaled)
    for _ in range(2):
        with compile_only(90) as programs:
            launch(cached, **PLAIN)
        assert len(programs) == 1


def test_hooks_see_every_launch(started, monkeypatch):
    cached, seen = cached_launches(_scaled), []
    launch(cached, **PLAIN)
    monkeypatch.setattr(_scaled, "pre_run_hooks", [lambda *_, **__: seen.append("before")])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", "another")
    for _ in range(2):
        launch(cached, **PLAIN)
    monkeypatch.setattr(_scaled, "pre_run_hooks", [])
    launch(cached, **PLAIN)
    assert seen == ["before"] * 2
    assert [given[2] for given in started[1:]] == ["another"] * 3


def test_more_memory_than_the_gpu_has_is_an_error_each_time():
    x = torch.ones(256 * 256, dtype=torch.bfloat16)
    with compile_only(90):
        for _ in range(2):
            with pytest.raises(OutOfResources, match="shared memory"):
                cached_launches(_product)[(1,)](x, x, x, SIZE=256, num_warps=8)
