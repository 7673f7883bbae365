"""RoPE on an NPU in host memory: right in every variant and layout, within the limits, and really by its operation."""

from __future__ import annotations

import functools
import itertools
from collections import Counter

import pytest
import torch
from support import rotations
from support.rotations import DIM, DTYPES, HALF, PAIRS, as_attention, heads_first, on, seen, tensors
from support.thorough import covering
from torch.utils.checkpoint import checkpoint

from fuseplug_host_npu import ContractError, HostNPU
from fuseplug_rope.backends import npu
from fuseplug_rope.backends.npu import layouts
from fuseplug_rope.reference import VARIANTS
from fuseplug_rope.reference import rope as reference

assert_right = functools.partial(rotations.assert_right, npu.rope, "npu")


@pytest.mark.parametrize(("variant", "dtypes"), covering(itertools.product(VARIANTS, DTYPES)), ids=str)
def test_every_variant_in_every_mix_of_dtypes(host_npu, variant, dtypes):
    assert_right(tensors(variant, *dtypes), variant=variant)
    assert (host_npu.calls["npu_rotary_mul"], host_npu.calls["npu_rotary_mul_backward"]) == (4, 0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_tables_too(host_npu, variant):
    leaves = tensors(variant, torch.bfloat16)
    assert_right([t.requires_grad_() for t in leaves], variant=variant)
    assert host_npu.calls["npu_rotary_mul"] == 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_tensors_of_a_real_size_keep_to_the_limits(fake_npu, variant):
    leaves = tensors(variant, torch.bfloat16, batch=4, length=4096, heads=(32, 8), dim=128, rest=64)
    leaves = [torch.empty_like(t, device="npu", requires_grad=t.requires_grad) for t in leaves]
    found = npu.rope(*as_attention(*leaves), variant=variant)
    sum(y.sum() for y in found).backward()
    for x, y in zip(leaves[:2], found, strict=True):
        assert (y.shape, y.device.type) == (x.transpose(1, 2).shape, "npu")
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)


# How x is seen from what a projection gives, how tables are from (tables, 1, sequence, angles), and what differs.
LAYOUTS = {
    "attention": (heads_first, lambda t: t, {}),
    "a table for each of the batch": (heads_first, lambda t: t, {"tables": 2}),
    "heads last": (lambda x: x, lambda t: t.transpose(1, 2), {}),
    "no batch": (lambda x: x[0], lambda t: t[0].transpose(0, 1), {}),
    "sequence first": (lambda x: x.transpose(0, 1), lambda t: t.permute(2, 0, 1, 3), {}),
    "tables of two dimensions": (heads_first, lambda t: t[0, 0], {}),
    "tables repeated for the batch": (heads_first, lambda t: t.expand(2, -1, -1, -1), {}),
    "heads before tokens in memory": (lambda x: heads_first(x).contiguous(), lambda t: t, {}),
    "the same, and a table for each": (lambda x: heads_first(x).contiguous(), lambda t: t, {"tables": 2}),
    "a table for each head": (heads_first, lambda t: t.expand(2, 1, -1, -1).transpose(0, 1), {"heads": (2, 2)}),
    "one token": (heads_first, lambda t: t, {"length": 1}),
    "one token, and a table for each": (heads_first, lambda t: t, {"length": 1, "tables": 2}),
    "one head": (heads_first, lambda t: t, {"heads": (1, 1)}),
    "one of each": (heads_first, lambda t: t, {"batch": 1, "length": 1, "heads": (1, 1)}),
    "the last tokens": (lambda x: heads_first(x)[..., 2:, :], lambda t: t[..., 2:, :], {"tables": 2}),
    "part of wider rows": (lambda x: heads_first(torch.cat((x, x), -1)[..., :DIM]), lambda t: t, {}),
    "five dimensions": (lambda x: torch.stack((x, -x)).transpose(2, 3), lambda t: t, {"tables": 2}),
    "a vector": (lambda x: x[0, 0, 0], lambda t: t[0, 0, 0], {}),
}
CONTIGUOUS = [
    {"batch": 8, "length": 16, "heads": (32, 32), "dim": 128},
    {"batch": 16, "length": 15, "heads": (8, 4), "dim": 256},
    {"batch": 2, "length": 64, "heads": (4, 4), "dim": 40},
    {"batch": 3, "length": 7, "heads": (2, 5), "dim": 18},
    {"batch": 40, "length": 3, "heads": (30, 2), "dim": 32},
    {"batch": 1200, "length": 2, "heads": (2, 2), "dim": 32},
]
"""Beside tables of the sequence alone. The last two have too many heads of one batch, and too many of the batch."""

turned = seen(lambda x: heads_first(x).contiguous(), lambda table: table)


@pytest.mark.parametrize("variant", [HALF, "half-partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", CONTIGUOUS, ids=lambda sizes: f"{sizes['batch']}-{sizes['length']}-{sizes['dim']}")
def test_contiguous_heads_are_not_refused_by_any_number_of_cores(host_npu, sizes, dtype, variant):
    leaves = tensors(variant, dtype, **sizes)
    for cores in (1, 40, 48):
        with HostNPU(vector_cores=cores) as chip:
            assert_right(leaves, turned, variant)
            assert chip.calls["npu_rotary_mul"] == 4
    with HostNPU(soc="Ascend950PR_9599") as chip:
        assert_right(leaves, turned, variant)
        assert chip.calls["npu_rotary_mul"] == 4


def test_contiguous_heads_as_they_are_would_be_refused(host_npu, monkeypatch):
    """The layout that was called before: batch, heads and sequence apart, and tables of the sequence."""

    def apart(sizes, strides, table, differ, mode):
        return layouts._layout([[0], [1], [2]], [False, False, True], sizes, table)

    monkeypatch.setattr(layouts, "_remembered", apart)
    with pytest.raises(ContractError, match="CheckBnsdBlockSkip"):
        assert_right(tensors(HALF, torch.bfloat16, **CONTIGUOUS[0]), turned)


@pytest.mark.parametrize("sizes", CONTIGUOUS[:2], ids=str)
def test_contiguous_heads_are_not_copied(host_npu, sizes):
    args = [t.detach() for t in turned(*on("npu", tensors(HALF, torch.bfloat16, **sizes)))]
    host_npu.calls.clear()
    npu.rope(*args)
    assert dict(host_npu.calls) == {"npu_rotary_mul": 2}


@pytest.mark.parametrize("see", [as_attention, turned])
@pytest.mark.parametrize("sizes", CONTIGUOUS[:3], ids=str)
def test_a_contiguous_gradient_is_not_refused(host_npu, sizes, see):
    found = []
    for device, function in (("npu", npu.rope), ("cpu", reference)):
        own = on(device, tensors(**sizes))
        y, _ = function(*see(*own))
        grad = torch.ones(y.shape, device=device)
        found.append(torch.autograd.grad(y, own[0], grad)[0].cpu())
    torch.testing.assert_close(*found)
    assert host_npu.calls["npu_rotary_mul"] == 3


WAYS = [HALF, PAIRS, "half-partial", "interleaved-partial", "interleaved-trailing", "mla"]


@pytest.mark.parametrize(
    ("variant", "layout", "tables_need"), covering(itertools.product(WAYS, LAYOUTS, [False, True]))
)
def test_any_layout(host_npu, variant, layout, tables_need):
    of_x, of_table, sizes = LAYOUTS[layout]
    leaves = tensors(variant, **sizes)
    for table in leaves[2:]:
        table.requires_grad_(tables_need)
    assert_right(leaves, seen(of_x, of_table), variant)
    assert host_npu.calls["npu_rotary_mul"] == 4


@pytest.mark.parametrize("tables", [1, 2])
@pytest.mark.parametrize("variant", [HALF, PAIRS])
def test_an_attention_is_two_launches_and_no_copies(host_npu, variant, tables):
    args = [t.detach() for t in as_attention(*on("npu", tensors(variant, tables=tables)))]
    host_npu.calls.clear()
    found = npu.rope(*args, variant=variant)
    assert dict(host_npu.calls) == {"npu_rotary_mul": 2}
    assert [y.stride() for y in found] == [x.stride() for x in args[:2]]


def test_tokens_cut_off_are_no_copies_either(host_npu):
    q, k, cos, sin = (t.detach() for t in as_attention(*on("npu", tensors(tables=2))))
    host_npu.calls.clear()
    npu.rope(*(t[..., 1:, :] for t in (q, k)), *(t[..., 1:, :].contiguous() for t in (cos, sin)))
    assert host_npu.calls["npu_rotary_mul"] == 2
    assert set(host_npu.calls) <= {"npu_rotary_mul", "aten::clone", "aten::contiguous"}
    assert host_npu.calls["aten::clone"] <= 2


def test_a_backward_keeps_the_tables_alone(host_npu):
    q, k, cos, sin = as_attention(*on("npu", tensors()))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        npu.rope(q, k, cos, sin)
    assert {t.untyped_storage().data_ptr() for t in kept} == {t.untyped_storage().data_ptr() for t in (cos, sin)}


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_needed(host_npu, frozen):
    leaves = tensors()
    leaves[frozen].requires_grad_(False)
    args = as_attention(*on("npu", leaves))
    found = npu.rope(*args)
    assert [y.requires_grad for y in found] == [frozen == 1, frozen == 0]
    found[1 - frozen].sum().backward()
    assert host_npu.calls["npu_rotary_mul"] == 3


def test_one_tensor_alone(host_npu):
    assert_right(tensors()[::2] + tensors()[3:], lambda q, cos, sin: (heads_first(q), None, cos, sin))
    assert host_npu.calls["npu_rotary_mul"] == 2


@pytest.mark.parametrize("variant", ["half-vision", "interleaved-wide", "complex"])
def test_wide_tables_lose_nothing(host_npu, variant):
    leaves = tensors(variant, torch.bfloat16, torch.float32)
    assert_right(leaves, variant=variant, roundings=0.0, share_of_theirs=1.0)


def test_wide_tables_lose_nothing_can_fail(host_npu, monkeypatch):
    monkeypatch.setattr(npu, "_working_dtype", lambda x, *_: x.dtype)
    with pytest.raises(AssertionError):
        assert_right(
            tensors("half-vision", torch.bfloat16, torch.float32),
            variant="half-vision",
            roundings=0.0,
            share_of_theirs=1.0,
        )


BEYOND = {
    "float64": (HALF, as_attention, {"x": torch.float64}),
    "as wide as not documented": (HALF, as_attention, {"dim": 896}),
    "as many heads as not documented": (HALF, as_attention, {"heads": (1000, 2)}),
    "an odd number": (HALF, as_attention, {"dim": 7}),
    "no tokens": (HALF, as_attention, {"length": 0}),
    "no batch": (PAIRS, as_attention, {"batch": 0}),
    "tables that enlarge": (HALF, as_attention, {"batch": 1, "tables": 3}),
}


@pytest.mark.parametrize("case", BEYOND)
def test_beyond_the_limits_it_is_the_reference(host_npu, case):
    variant, see, sizes = BEYOND[case]
    assert_right(tensors(variant, **sizes), see, variant)
    assert not host_npu.calls["npu_rotary_mul"]


WITHIN = {
    "the widest": (HALF, as_attention, {"dim": 894}),
    "the most heads": (PAIRS, as_attention, {"heads": (999, 2), "batch": 1}),
    "a large batch": (HALF, as_attention, {"batch": 999, "length": 2}),
    "a larger one": (HALF, as_attention, {"batch": 1200, "length": 2}),
    "a larger one with tables of its own": (HALF, as_attention, {"batch": 1200, "length": 2, "tables": 1200}),
    "a larger one, heads first": (
        HALF,
        seen(lambda x: heads_first(x).contiguous(), lambda t: t),
        {"batch": 1200, "length": 2, "tables": 1200},
    ),
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
    assert_right(tensors(variant, **sizes), see, variant)
    assert host_npu.calls["npu_rotary_mul"] == 4


@pytest.mark.parametrize("variant", ["nothing", HALF])
def test_what_does_not_fit_is_said_as_by_the_reference(host_npu, variant):
    q, k, cos, sin = as_attention(*on("npu", tensors(length=3)))
    said = []
    for function in (npu.rope, reference):
        with pytest.raises(ValueError, match="variant") as error:
            function(q, k, cos[..., :-2], sin[..., :-2], variant=variant)
        said.append(str(error.value))
    assert said[0] == said[1]


@pytest.mark.parametrize("tables_need", [False, True])
@pytest.mark.parametrize("variant", [HALF, PAIRS])
def test_double_backward(host_npu, variant, tables_need):
    leaves = tensors(variant)
    for table in leaves[2:]:
        table.requires_grad_(tables_need)
    found = []
    for device, function in (("npu", npu.rope), ("cpu", reference)):
        own = on(device, leaves)
        wanted = [t for t in own if t.requires_grad]
        loss = sum(y.square().sum() for y in function(*as_attention(*own), variant=variant))
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append([t.cpu() for t in torch.autograd.grad(sum(g.sin().sum() for g in first), wanted)])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(host_npu, use_reentrant):
    leaves = on("npu", tensors())
    out, _ = checkpoint(npu.rope, *as_attention(*leaves), use_reentrant=use_reentrant)
    out.sum().backward()
    q, k, cos, sin = on("cpu", leaves)
    reference(*as_attention(q, k, cos, sin))[0].sum().backward()
    torch.testing.assert_close(leaves[0].grad.cpu(), q.grad)
    assert host_npu.calls["npu_rotary_mul"] >= 5


def test_vmap_sees_the_reference(host_npu):
    args = [t.detach() for t in as_attention(*on("npu", tensors()))]
    found = torch.vmap(lambda q: npu.rope(q, None, args[2][0], args[3][0])[0])(args[0])
    assert not host_npu.calls["npu_rotary_mul"]
    torch.testing.assert_close(found.cpu(), reference(*(t.cpu() for t in args))[0])


@pytest.mark.parametrize("variant", [HALF, PAIRS, "mla"])
def test_a_compiled_module_is_one_graph_with_the_operation_in_it(host_npu, variant):
    leaves = on("npu", tensors(variant))
    compiled = torch.compile(functools.partial(npu.rope, variant=variant), fullgraph=True, backend="aot_eager")
    sum(y.square().sum() for y in compiled(*as_attention(*leaves))).backward()
    assert host_npu.calls["npu_rotary_mul"] == 4
    own = on("cpu", leaves)
    sum(y.square().sum() for y in reference(*as_attention(*own), variant=variant)).backward()
    for found, expected in zip(leaves[:2], own[:2], strict=True):
        torch.testing.assert_close(found.grad.cpu(), expected.grad)


def test_sizes_that_change_are_compiled_once(host_npu):
    graphs = []
    compiled = torch.compile(npu.rope, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for batch, length in ((2, 5), (2, 7), (3, 11), (4, 13)):
        args = [t.detach() for t in as_attention(*on("npu", tensors(batch=batch, length=length)))]
        torch.testing.assert_close(compiled(*args)[0].cpu(), reference(*(t.cpu() for t in args))[0])
    assert len(graphs) <= 3


@pytest.mark.parametrize("variant", ["half-partial", "mla"])
def test_a_backward_is_one_launch_more_than_the_rotation(host_npu, variant):
    leaves = on("npu", tensors(variant))
    found, _ = npu.rope(*as_attention(*leaves), variant=variant)
    grad = torch.ones(found.transpose(1, 2).shape, device="npu").transpose(1, 2)
    host_npu.calls.clear()
    torch.autograd.grad(found, leaves[0], grad)
    on_tables = {"aten::neg": 2, "aten::cat": 1}
    assert sum((host_npu.calls - Counter(on_tables)).values()) == 2, host_npu.calls


def test_gradients_of_the_tables_have_no_limit_of_their_own(host_npu):
    leaves = tensors(batch=40, heads=(30, 2), length=2)
    assert_right([t.requires_grad_() for t in leaves])
    assert host_npu.calls["npu_rotary_mul"] == 4


def test_a_repeated_table_has_a_gradient_at_each_of_its_places(host_npu):
    found = []
    for device, function in (("npu", npu.rope), ("cpu", reference)):
        q, k, cos, sin = as_attention(*on(device, tensors()))
        repeated = [table.expand(2, -1, -1, -1).detach().requires_grad_() for table in (cos, sin)]
        loss = sum(y.square().sum() for y in function(q, k, *repeated))
        found.append([t.cpu() for t in torch.autograd.grad(loss, repeated)])
    torch.testing.assert_close(*found)
