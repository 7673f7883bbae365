"""Triton's programs for RMSNorm: everything in registers, and nothing compiled for another number of tokens."""

import itertools
import re

import pytest
import torch
from support.thorough import covering

from fuseplug_rmsnorm.backends import triton as kernel
from fuseplug_rmsnorm.backends.triton import launches, programs
from fuseplug_testing.triton import compile_only

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    """Sets the number of multiprocessors to that of an H100, which Triton need not know."""
    monkeypatch.setattr(launches, "_processors", lambda _: 132)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Drops what earlier tests compiled, so that each test sees what it compiles itself."""
    for program in (programs.forward, programs.backward, programs.add_up):
        program.fn.device_caches.clear()


def norm(x, weight, **options):
    y = kernel.rms_norm(x, weight, **options)
    return torch.autograd.grad(y, (x, weight), torch.empty_like(y))


def sum_and_norm(x, weight):
    results = kernel.add_rms_norm(x, x.detach(), weight)
    return torch.autograd.grad(results, (x, weight), [torch.empty_like(each) for each in results])


def leaves(tokens, width, dtype=BF16):
    return (torch.empty(shape, dtype=dtype, requires_grad=True) for shape in ((tokens, width), (width,)))


@pytest.mark.parametrize(
    ("width", "run"), covering(itertools.product([128, 1024, 2048, 4096, 8192, 16384], [norm, sum_and_norm]))
)
def test_nothing_is_spilled(width, run):
    with compile_only(90) as compiled:
        run(*leaves(1 << 15, width))
    assert [program.name for program in compiled] == ["forward", "backward", "add_up"]
    assert not any(program.spills for program in compiled)
    assert compiled[0].registers <= 48  # so that 40 warps fit a multiprocessor


@pytest.mark.parametrize(
    ("width", "variant"), covering(itertools.product([64, 128, 1024, 4096, 8192], ["gated-silu", "gate-first"]))
)
def test_nothing_is_spilled_with_a_gate(width, variant):
    x, weight = leaves(1 << 15, width)
    with compile_only(90) as compiled:
        norm(x, weight, variant=variant, gate=torch.empty_like(x))
    assert not any(program.spills for program in compiled)


@pytest.mark.parametrize("width", [128, 4096, 8192])
def test_nothing_is_spilled_in_float32(width):
    with compile_only(90) as compiled:
        norm(*leaves(1 << 15, width, torch.float32))
    assert not any(program.spills for program in compiled)


@pytest.mark.parametrize(
    ("width", "dtype", "capability"),
    covering(itertools.product([128, 1024, 4096, 8192], [BF16, torch.float32], [89, 90])),
)
def test_what_is_read_ahead_fits_the_gpu(monkeypatch, width, dtype, capability):
    room = {89: 99 << 10, 90: 227 << 10}[capability]
    monkeypatch.setattr(launches, "shared_memory", lambda _: room)
    together = max(1, launches._WARPS_PER_PROCESSOR // launches._tile(width, launches._FEWEST_WARPS_BACK)[1])
    with compile_only(capability) as compiled:
        norm(*leaves(1 << 15, width, dtype))
        x, weight = leaves(1 << 15, width, dtype)
        norm(x, weight, variant="gated-silu", gate=torch.empty_like(x))
        sum_and_norm(*leaves(1 << 15, width, dtype))
    of_backward = [program.shared for program in compiled if program.name == "backward"]
    assert len(of_backward) == 3
    assert max(of_backward) * together <= room


@pytest.mark.parametrize("run", [norm, sum_and_norm])
def test_another_number_of_tokens_compiles_nothing(run):
    with compile_only(90) as compiled:
        run(*leaves(1 << 12, 4096))
        known = len(compiled)
        for tokens in (1, 2, 16, 17, 1000, 4097):
            run(*leaves(tokens, 4096))
    # One row's gradient of the weight is written directly, in the weight's dtype: there is nothing to add up.
    assert [program.name for program in compiled[known:]] == ["backward"]


@pytest.mark.parametrize("width", [1024, 4096, 16384])
def test_rows_are_moved_by_16_bytes(width):
    with compile_only(90):
        norm(*leaves(64, width))
    for program in (programs.forward, programs.backward):
        ((kernels, *_),) = program.fn.device_caches.values()
        (kernel,) = kernels.values()
        moves = set(re.findall(r"(?:ld|st)\.global\S*?((?:\.v\d)?\.b\d+)", kernel.asm["ptx"]))
        assert ".v4.b32" in moves
        # A weight of 1024 elements has eight bytes for each of 256 lanes.
        assert not moves & {".b16", ".v2.b16", ".v4.b16", *([] if width == 1024 else [".v2.b32"])}
    ahead = set(re.findall(r"cp\.async\.\w+\.shared\.global \[.*?\], \[.*?\], (\w+)", kernel.asm["ptx"]))
    assert ahead - {"0x4"} == ({"0x10"} if width <= 8192 else set())  # 4 bytes: one number of each row
