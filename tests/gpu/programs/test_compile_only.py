"""`compile_only` compiles kernels for a GPU that is not here, and tells what they take."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from fuseplug_testing.triton import compile_only


@triton.jit
def _copy(y, x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


@triton.jit
def _hoard(y, x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    kept = tl.load(x + at)
    tl.store(y + at, kept / tl.sum(kept))


@triton.jit
def _product(y, a, b, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(y + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_a_launch_compiles_and_writes_nothing():
    x, y = torch.ones(256), torch.zeros(256)
    with compile_only(90) as programs:
        for _ in range(2):
            _copy[(1,)](y, x, BLOCK=256)
        assert [(program.name, program.spills) for program in programs] == [("_copy", 0)]
        _copy[(1,)](y, x, BLOCK=128)
    assert len(programs) == 2
    assert 0 < programs[0].registers < 64
    assert not y.any()


def test_what_is_needed_within_is_told_though_it_was_compiled_before():
    x = torch.ones(64)
    for _ in range(2):
        with compile_only(90) as programs:
            _copy[(1,)](x, x, BLOCK=64)
        assert len(programs) == 1


def test_spills_are_seen():
    x = torch.ones(1 << 11)
    with compile_only(90) as programs:
        _hoard[(1,)](x, x, BLOCK=1 << 11, num_warps=1, maxnreg=24)
    assert programs[0].spills > 0


def test_more_memory_than_the_gpu_has_is_an_error():
    x = torch.ones(256 * 256, dtype=torch.bfloat16)
    with compile_only(90), pytest.raises(OutOfResources, match="shared memory"):
        _product[(1,)](x, x, x, SIZE=256, num_warps=8)


def test_the_driver_that_was_active_is_so_again():
    before = driver._active
    with pytest.raises(ZeroDivisionError), compile_only(90):
        raise ZeroDivisionError
    assert driver._active is before


def test_the_interpreter_compiles_nothing(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET"), compile_only(90):
        pass
