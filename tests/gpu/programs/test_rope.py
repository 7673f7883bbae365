"""Triton's programs for the rotation on an H100: registers, the width of loads, and one program for all lengths."""

import itertools
import re

import pytest
import torch
from support.thorough import covering

from fuseplug_rope.backends.triton import rope
from fuseplug_rope.backends.triton.program import rotate
from fuseplug_rope.reference import VARIANTS
from fuseplug_testing.triton import compile_only

HALF, BFLOAT16 = "half", torch.bfloat16


@pytest.fixture(autouse=True)
def nothing_compiled():
    rotate.fn.device_caches.clear()


def arguments(variant=HALF, width=128, part=1.0, x=BFLOAT16, table=None, batch=1, length=7, heads=(32, 8)):
    """q and k as in attention, ``(batch, heads, length, width)``, and the tables."""
    rotated = int(part * width)
    angles = rotated // 2 if VARIANTS[variant].table == "half" else rotated
    qk = [torch.empty(batch, length, h, width, dtype=x, requires_grad=True).transpose(1, 2) for h in heads]
    return *qk, *(torch.empty(1, 1, length, angles, dtype=table or x) for _ in range(2))


def forward_and_backward(variant=HALF, **sizes):
    q, k, cos, sin = arguments(variant, **sizes)
    found = rope(q, k, cos, sin, variant=variant)
    torch.autograd.grad(found, (q, k), [torch.empty_like(y) for y in found])


def widths(access):
    """How many bytes each load or store instruction of the one program moves at a time."""
    (cache,) = [caches[0] for caches in rotate.fn.device_caches.values()]
    (program,) = cache.values()
    found = re.findall(rf"{access}\.global(?:\.v(\d))?\.b(\d+)", program.asm["ptx"])
    return [int(count or 1) * int(bits) // 8 for count, bits in found]


CASES = {
    "Llama": {},
    "heads of 64": {"width": 64},
    "heads of 96": {"width": 96},
    "heads of 256": {"width": 256},
    "vision": {"variant": "half-vision", "width": 72, "heads": (16, 16)},
    "tables in float32": {"variant": "half-promoting", "table": torch.float32},
    "a quarter": {"variant": "half-partial", "part": 0.25},
    "a quarter of 256": {"variant": "half-partial", "width": 256, "part": 0.25},
    "neighbours": {"variant": "interleaved"},
    "neighbours, in part": {"variant": "interleaved-partial", "part": 0.25},
    "DeepSeek's": {"variant": "mla", "width": 64, "heads": (128, 1)},
    "one head": {"width": 64, "heads": (1, 1)},
}


@pytest.mark.parametrize(("case", "x"), covering(itertools.product(CASES, [BFLOAT16, torch.float32])), ids=str)
def test_nothing_spills(case, x):
    with compile_only(90) as programs:
        forward_and_backward(x=x, **CASES[case])
    assert len(programs) == 2
    for program in programs:
        assert program.spills == 0
        assert program.registers <= 80  # so that 6 blocks of 128 threads fit
        assert program.shared <= 16 << 10


def test_one_tensor_alone_takes_no_more():
    q, _, cos, sin = arguments()
    with compile_only(90) as programs, torch.no_grad():
        rope(q, None, cos, sin)
        rope(*arguments())
    assert programs[0].registers <= programs[1].registers


@pytest.mark.parametrize("variant", [HALF, "interleaved"])
def test_q_is_read_and_written_in_vectors_of_16_bytes(variant):
    with compile_only(90), torch.no_grad():
        rope(*arguments(variant), variant=variant)
    assert widths("ld").count(16) >= 4
    assert widths("st").count(16) >= 4
    assert min(widths("st")) >= 8


def test_rows_that_are_no_multiple_of_16_elements_are_read_in_vectors_too():
    with compile_only(90), torch.no_grad():
        rope(*arguments(width=72))
    assert min(widths("ld")) >= 8  # a half of 36 elements begins at a multiple of 8 bytes


SIZES = [(1, 1, (32, 8)), (1, 16, (32, 8)), (2, 7, (31, 7)), (3, 4096, (32, 8)), (16, 1, (32, 8))]


@pytest.mark.parametrize("width", [72, 128])
def test_one_program_for_all_lengths_and_batches(width):
    with compile_only(90) as programs:
        for batch, length, heads in SIZES:
            forward_and_backward(batch=batch, length=length, heads=heads, width=width)
    assert len(programs) == 2
