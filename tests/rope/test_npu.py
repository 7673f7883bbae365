"""What is specific to RoPE on NPUs: one operation without copies, calls that CANN would refuse, and its limits."""

import functools
import itertools
from collections import Counter

import pytest
import torch
from support import rotations
from support.rotations import HALF, PAIRS, WAYS, as_attention, heads_first, on, seen, tensors
from support.thorough import covering

from fuseplug_host_npu import ContractError, HostNPU
from fuseplug_rope.backends import npu
from fuseplug_rope.backends.npu import layouts
from fuseplug_rope.kernels import NpuRoPEKernel
from fuseplug_rope.reference import rope as reference

check = functools.partial(rotations.assert_right, npu.rope, "npu")
turned = seen(lambda x: heads_first(x).contiguous(), lambda table: table)

CONTIGUOUS = [
    {"batch": 8, "length": 16, "heads": (32, 32), "dim": 128},
    {"batch": 16, "length": 15, "heads": (8, 4), "dim": 256},
    {"batch": 2, "length": 64, "heads": (4, 4), "dim": 40},
    {"batch": 3, "length": 7, "heads": (2, 5), "dim": 18},
    {"batch": 40, "length": 3, "heads": (30, 2), "dim": 32},
    {"batch": 1200, "length": 2, "heads": (2, 2), "dim": 32},
]
"""Sizes of heads, for tables of the sequence alone. In the last two, batch times heads, or the batch, is too large."""


@pytest.mark.parametrize(
    ("sizes", "dtype", "variant"),
    covering(itertools.product(CONTIGUOUS, [torch.bfloat16, torch.float32], [HALF, "half-partial"])),
    ids=str,
)
def test_contiguous_heads_are_not_refused_by_any_number_of_cores(host_npu, sizes, dtype, variant):
    leaves = tensors(variant, dtype, **sizes)
    for machine in ({"vector_cores": 1}, {"vector_cores": 40}, {"vector_cores": 48}, {"soc": "Ascend950PR_9599"}):
        with HostNPU(**machine) as chip:
            check(leaves, turned, variant)
            assert chip.calls["npu_rotary_mul"] == 4


def test_contiguous_heads_as_they_are_would_be_refused(host_npu, monkeypatch):
    """The layout that was passed before: batch, heads and sequence apart, and tables of the sequence."""

    def apart(sizes, strides, table, differ, mode):
        return layouts._layout([[0], [1], [2]], [False, False, True], sizes, table)

    monkeypatch.setattr(layouts, "_remembered", apart)
    with pytest.raises(ContractError, match="CheckBnsdBlockSkip"):
        check(tensors(HALF, torch.bfloat16, **CONTIGUOUS[0]), turned)


@pytest.mark.parametrize("see", [as_attention, turned])
@pytest.mark.parametrize("sizes", CONTIGUOUS[:3], ids=str)
def test_a_contiguous_gradient_is_not_refused(host_npu, sizes, see):
    gradients = []
    for device, function in (("npu", npu.rope), ("cpu", reference)):
        leaves = on(device, tensors(**sizes))
        y, _ = function(*see(*leaves))
        gradients.append(torch.autograd.grad(y, leaves[0], torch.ones(y.shape, device=device))[0].cpu())
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("variant", "see", "sizes"),
    [
        (HALF, as_attention, {}),
        (PAIRS, as_attention, {}),
        (HALF, as_attention, {"tables": 2}),
        (HALF, turned, CONTIGUOUS[0]),
        (HALF, turned, CONTIGUOUS[1]),
    ],
    ids=["half", "interleaved", "two rows of tables", "many heads", "wide heads"],
)
def test_an_attention_is_two_launches_and_no_copies(host_npu, variant, see, sizes):
    arguments = [t.detach() for t in see(*on("npu", tensors(variant, torch.bfloat16, **sizes)))]
    host_npu.calls.clear()
    results = npu.rope(*arguments, variant=variant)
    assert host_npu.calls == Counter(npu_rotary_mul=2)
    assert [y.stride() for y in results] == [x.stride() for x in arguments[:2]]


@pytest.mark.parametrize("variant", WAYS)
def test_forward_and_backward_are_the_operation(host_npu, variant):
    check([t.requires_grad_() for t in tensors(variant)], variant=variant)
    assert (host_npu.calls["npu_rotary_mul"], host_npu.calls["npu_rotary_mul_backward"]) == (4, 0)


@pytest.mark.parametrize("variant", ["half-partial", "mla"])
def test_a_backward_is_one_launch_more_than_the_rotation(host_npu, variant):
    leaves = on("npu", tensors(variant))
    y, _ = npu.rope(*as_attention(*leaves), variant=variant)
    grad = torch.ones(y.transpose(1, 2).shape, device="npu").transpose(1, 2)
    host_npu.calls.clear()
    torch.autograd.grad(y, leaves[0], grad)
    on_tables = {"aten::neg": 2, "aten::cat": 1}
    assert sum((host_npu.calls - Counter(on_tables)).values()) == 2, host_npu.calls


def test_tokens_cut_off_are_no_copies_either(host_npu):
    q, k, cos, sin = (t.detach() for t in as_attention(*on("npu", tensors(tables=2))))
    host_npu.calls.clear()
    npu.rope(*(t[..., 1:, :] for t in (q, k)), *(t[..., 1:, :].contiguous() for t in (cos, sin)))
    assert host_npu.calls["npu_rotary_mul"] == 2
    assert set(host_npu.calls) <= {"npu_rotary_mul", "aten::clone", "aten::contiguous"}
    assert host_npu.calls["aten::clone"] <= 2


@pytest.mark.parametrize("variant", ["half-vision", "interleaved-wide", "complex"])
def test_wide_tables_lose_nothing(host_npu, variant):
    leaves = tensors(variant, torch.bfloat16, torch.float32)
    check(leaves, variant=variant, roundings=0.0, share_of_theirs=1.0)


def test_wide_tables_lose_nothing_can_fail(host_npu, monkeypatch):
    monkeypatch.setattr(npu, "_working_dtype", lambda x, *_: x.dtype)
    with pytest.raises(AssertionError):
        test_wide_tables_lose_nothing(host_npu, "half-vision")


BEYOND = {
    "float64": (HALF, as_attention, {"x": torch.float64}),
    "as wide as not documented": (HALF, as_attention, {"dim": 896}),
    "as many heads as not documented": (HALF, as_attention, {"heads": (1000, 2)}),
    "an odd number": (HALF, as_attention, {"dim": 7}),
    "no tokens": (HALF, as_attention, {"length": 0}),
    "tables that enlarge": (HALF, as_attention, {"batch": 1, "tables": 3}),
}


@pytest.mark.parametrize("case", BEYOND)
def test_beyond_the_limits_it_is_the_reference(host_npu, case):
    variant, see, sizes = BEYOND[case]
    check(tensors(variant, **sizes), see, variant)
    assert not host_npu.calls["npu_rotary_mul"]


WITHIN = {
    "the widest": (HALF, as_attention, {"dim": 894}),
    "the most heads": (PAIRS, as_attention, {"heads": (999, 2), "batch": 1}),
    "a large batch": (HALF, as_attention, {"batch": 999, "length": 2}),
    "a larger one": (HALF, as_attention, {"batch": 1200, "length": 2}),
    "a larger one with tables of its own": (HALF, as_attention, {"batch": 1200, "length": 2, "tables": 1200}),
    "a larger one, heads first": (HALF, turned, {"batch": 1200, "length": 2, "tables": 1200}),
    "many heads of many, in pairs": (PAIRS, as_attention, {"batch": 40, "heads": (30, 2)}),
    "a long sequence": (PAIRS, as_attention, {"length": 3000, "batch": 1}),
    "one long sequence first": (
        HALF,
        seen(lambda x: x.transpose(0, 1), lambda t: t.permute(2, 0, 1, 3)),
        {"length": 2000},
    ),
}


@pytest.mark.parametrize("case", WITHIN)
def test_up_to_the_limits_it_is_the_operation(host_npu, case):
    variant, see, sizes = WITHIN[case]
    check(tensors(variant, **sizes), see, variant)
    assert host_npu.calls["npu_rotary_mul"] == 4


def test_sizes_that_change_are_compiled_once(host_npu):
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(npu.rope, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for batch, length in ((2, 5), (2, 7), (3, 11), (4, 13)):
        arguments = [t.detach() for t in as_attention(*on("npu", tensors(batch=batch, length=length)))]
        torch.testing.assert_close(compiled(*arguments)[0].cpu(), reference(*(t.cpu() for t in arguments))[0])
    assert len(graphs) <= 3


def test_what_is_lacking_is_said(monkeypatch):
    assert NpuRoPEKernel().lacks("npu") is None
    monkeypatch.setattr(NpuRoPEKernel, "ops", ("npu_rotary_mul", "npu_nothing"))
    assert "has no npu_nothing" in NpuRoPEKernel().lacks("npu")
