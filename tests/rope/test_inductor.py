"""What Inductor compiles is right, really runs, copies nothing, and is compiled a handful of times."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from support.thorough import covering, first_quick, quick_if, thorough
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseplug_backends.inductor import program
from fuseplug_rope.backends import inductor
from fuseplug_rope.kernels import InductorRoPEKernel
from fuseplug_rope.reference import VARIANTS
from fuseplug_rope.reference import rope as reference

pytestmark = pytest.mark.skipif(
    InductorRoPEKernel().unavailable("cpu") is not None, reason="Inductor needs a C++ compiler"
)

DIM = 16
# One for each way that the formula is written.
WAYS = ["half", "half-partial", "interleaved", "mla"]


@pytest.fixture
def ran(everything_compiled, monkeypatch):
    """Counts the compiled programs that are started; small inputs are compiled for as well."""
    started = []
    run = type(inductor._fused).run

    def counted(self, constants, xs, tables, transposed=None, **layout):
        started.append("forward" if transposed is None else "backward")
        return run(self, constants, xs, tables, transposed, **layout)

    monkeypatch.setattr(type(inductor._fused), "run", counted)
    return started


@pytest.fixture
def traced(ran, monkeypatch):
    """The same, with programs that are recorded but not made into machine code: for what layouts they get and give."""
    monkeypatch.setattr(inductor._fused, "_programs", {})
    monkeypatch.setattr(program, "compiled_by_inductor", lambda recording, *_: (recording.graph, lambda: None))
    return ran


def tensors(variant="half", dtype=torch.float32, batch=2, length=5, heads=(3, 2), tables=1, tables_need=False):
    """q and k as an attention makes them, in the memory of (batch, sequence, heads, head_dim), and the tables."""
    how = VARIANTS[variant]
    generator = torch.Generator().manual_seed(0)
    rotated = DIM if how.width == "whole" else DIM - 4
    angles = rotated // 2 if how.table == "half" else rotated
    made = [torch.randn(batch, length, h, DIM, generator=generator).to(dtype).transpose(1, 2) for h in heads]
    made += [torch.randn(tables, 1, length, angles, generator=generator).to(dtype) for _ in range(2)]
    return [t.requires_grad_(tables_need or number < 2) for number, t in enumerate(made)]


def outcome(function, ins, variant, wide=False):
    made = [t if t is None else t.double() if wide else t for t in ins]
    out = [y for y in function(*made, variant=variant) if y is not None]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in out]
    leaves = [t for t in ins if t is not None and t.requires_grad]
    differentiable = [y.requires_grad for y in out]
    given = [list(itertools.compress(each, differentiable)) for each in (out, grads)]
    return [*(y.detach() for y in out), *torch.autograd.grad(given[0], leaves, given[1])]


def assert_right(*ins, variant="half", function=inductor.rope):
    found, eager = (outcome(f, ins, variant) for f in (function, reference))
    for ours, theirs, exact in zip(found, eager, outcome(reference, ins, variant, wide=True), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        error, allowed = ((t.double() - exact.double()).abs() for t in (ours, theirs))
        share = 4 * torch.finfo(ours.dtype).eps + 16 * torch.finfo(torch.float32).eps
        assert (error.amax(-1) <= torch.maximum(2 * allowed.amax(-1), share * exact.double().abs().amax(-1))).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_values_and_gradients_are_right_small(variant):
    assert_right(*tensors(variant), variant=variant)


@pytest.mark.parametrize("variant", first_quick(WAYS))
def test_values_and_gradients_are_right_compiled(ran, variant):
    assert_right(*tensors(variant, torch.bfloat16), variant=variant)
    assert ran == ["forward", "backward"]


@thorough
def test_float32_and_tables_of_another_dtype(ran):
    assert_right(*tensors())
    q, k, cos, sin = tensors(dtype=torch.bfloat16)
    assert_right(q, k, cos.float(), sin.float())
    assert ran == ["forward", "backward"] * 2


@pytest.mark.parametrize("variant", [name for name, how in VARIANTS.items() if name not in WAYS])
def test_the_formula_is_that_of_every_other_variant(variant):
    how = VARIANTS[variant]
    q, _, cos, sin = tensors(variant)
    rotated = cos.shape[-1] * (2 if how.table == "half" else 1)
    found = inductor.rope_formula(q, cos, sin, variant, rotated, q.dtype)
    torch.testing.assert_close(found, reference(q, None, cos, sin, variant=variant)[0])


def test_gradients_of_the_tables_too(ran):
    assert_right(*tensors(tables_need=True))
    assert ran == ["forward", "backward"]


def test_a_backward_keeps_the_tables_alone(ran):
    q, k, cos, sin = tensors()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        inductor.rope(q, k, cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


@pytest.mark.parametrize("frozen", first_quick([0, 1]))
def test_only_the_gradients_that_are_needed(traced, frozen):
    ins = tensors()
    ins[frozen].requires_grad_(False)
    assert [y.requires_grad for y in inductor.rope(*ins)] == [frozen == 1, frozen == 0]
    traced.clear()
    assert_right(*ins)
    assert traced == ["forward", "backward"]


def test_one_tensor_alone(traced):
    q, _, cos, sin = tensors()
    assert_right(q, None, cos, sin)
    assert traced == ["forward", "backward"]


LAYOUTS = {
    "packed": lambda t: t.contiguous(),
    "part of wider rows": lambda t: torch.cat((t, t), -1)[..., :DIM],
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
    "sequence first": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "expanded": lambda t: t[:, :1].expand(-1, 3, -1, -1),
    "heads of a wider projection": lambda t: torch.cat((t, t), 1)[:, : t.shape[1]],
}


@pytest.mark.parametrize("lay", quick_if(LAYOUTS, {"strided", "sequence first", "expanded"}))
def test_any_layout_in_memory(traced, lay):
    q, k, cos, sin = tensors()
    whole = LAYOUTS[lay](q).detach().requires_grad_()
    before = whole.detach().clone()
    assert_right(whole, k, cos, sin)
    assert traced == ["forward", "backward"]
    assert torch.equal(whole, before)


@pytest.mark.parametrize(
    "tables", [lambda t: t[0, 0], lambda t: t[:1].expand(2, 1, -1, -1), lambda t: t.expand(2, 3, -1, -1)]
)
def test_tables_of_fewer_dimensions_and_expanded_ones(traced, tables):
    q, _, cos, sin = tensors()
    assert_right(q, None, tables(cos), tables(sin))
    assert traced == ["forward", "backward"]


@pytest.mark.parametrize("heads", first_quick(map(pytest.param, [(1, 3), (1, 1), (3, 1)])), ids=str)
def test_single_heads_and_single_tokens(traced, heads):
    for batch, length in ((1, 2), (2, 1), (1, 4)):
        assert_right(*tensors(batch=batch, length=length, heads=heads))
    assert traced == ["forward", "backward"] * 3


@pytest.mark.parametrize(
    ("variant", "lay"),
    covering(
        itertools.product(VARIANTS, ["packed", "sequence first", "as it is"]),
        by=lambda variant, lay: [variant if variant in WAYS else "another", lay],
    ),
)
def test_the_result_lies_in_memory_as_the_references(traced, variant, lay):
    q, k, cos, sin = tensors(variant)
    q, k = map(LAYOUTS.get(lay, lambda t: t), (q, k))
    expected = [y.stride() for y in reference(q, k, cos, sin, variant=variant)]
    assert [y.stride() for y in inductor.rope(q, k, cos, sin, variant=variant)] == expected
    with torch.no_grad():
        assert [y.stride() for y in inductor.rope(q, k, cos, sin, variant=variant)] == expected
    assert (expected == [q.stride(), k.stride()]) == (VARIANTS[variant].keeps_order or lay == "packed")


def test_gradients_that_are_expanded_or_strided(traced):
    q, k, cos, sin = tensors()
    for loss in (
        lambda q, k: q.sum() + k.sum(),
        lambda q, k: (q.transpose(0, 2).flatten(1).cumsum(-1)).sum() + k[..., ::2].sum(),
    ):
        ours, theirs = (torch.autograd.grad(loss(*f(q, k, cos, sin)), (q, k)) for f in (inductor.rope, reference))
        torch.testing.assert_close(ours, theirs)
    assert traced == ["forward", "backward"] * 2


@pytest.mark.parametrize("tables_need", [False, True])
def test_double_backward(ran, tables_need):
    q, k, cos, sin = tensors(tables_need=tables_need)
    wanted = [t for t in (q, k, cos, sin) if t.requires_grad]
    found = []
    for function in (inductor.rope, reference):
        loss = sum(y.square().sum() for y in function(q, k, cos, sin))
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), wanted))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert ran


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(ran, use_reentrant):
    q, k, cos, sin = tensors()
    out, _ = checkpoint(inductor.rope, q, k, cos, sin, use_reentrant=use_reentrant)
    out.sum().backward()
    torch.testing.assert_close(q.grad, torch.autograd.grad(reference(q, k, cos, sin)[0].sum(), q)[0])
    assert "backward" in ran


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(ran, context):
    ins = tensors()
    with context():
        found = inductor.rope(*ins)
    torch.testing.assert_close(found, tuple(y.detach() for y in reference(*ins)))
    assert found[0].grad_fn is None
    assert ran == ["forward"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_few_tokens_take_a_lean_way_that_is_right(dtype):
    ins = tensors(dtype=dtype, length=1)
    with torch.no_grad():
        found, eager = (f(*ins) for f in (inductor.rope, reference))
        exact = reference(*(t.double() for t in ins))
    for ours, theirs, truth in zip(found, eager, exact, strict=True):
        assert ours.dtype is theirs.dtype
        assert (ours - truth).abs().max() <= 1.01 * (theirs - truth).abs().max() + 1e-6


def test_values_that_are_not_finite(ran):
    q, k, cos, sin = (t.detach() for t in tensors())
    q[0, 0, 0, 3], q[0, 1, 1, 2], k[1, 1, 4, 9] = float("nan"), float("inf"), -float("inf")
    for function in (inductor.rope, torch.no_grad()(inductor.rope)):
        torch.testing.assert_close(function(q, k, cos, sin), reference(q, k, cos, sin), equal_nan=True)
    assert ran


def test_functorch_forward_mode_and_fake_tensors_see_the_reference(ran):
    q, _, cos, sin = (t.detach() for t in tensors())

    def ours(q): return inductor.rope(q, None, cos, sin)[0]  # fmt: skip

    def theirs(q): return reference(q, None, cos, sin)[0]  # fmt: skip

    for transform in (
        torch.vmap,
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
    ):
        torch.testing.assert_close(transform(ours)(q), transform(theirs)(q))
    assert not ran


class Rotates(nn.Module):
    def forward(self, q, k, cos, sin):
        return inductor.rope(q, k, cos, sin)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_compiles_as_one_graph_exports_and_traces(ran):
    ins = [t.detach() for t in tensors()]
    expected = reference(*ins)
    compiled = torch.compile(Rotates(), fullgraph=True, backend="aot_eager")
    exported = torch.export.export(Rotates(), tuple(ins)).module()
    for function in (compiled, exported, torch.jit.trace(Rotates(), tuple(ins), check_trace=False)):
        torch.testing.assert_close(function(*ins), expected)
    assert not ran


def test_autocast_changes_nothing(ran):
    ins = tensors(dtype=torch.bfloat16)
    plain = inductor.rope(*ins)
    with torch.autocast("cpu", dtype=torch.float16):
        for ours, theirs in zip(inductor.rope(*ins), plain, strict=True):
            assert torch.equal(ours, theirs)
    assert ran


def test_results_repeat_to_the_bit(ran):
    ins = tensors(length=33)
    once, again = (outcome(inductor.rope, ins, "half") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


def test_threads_may_all_be_first(traced):
    q, k, cos, sin = tensors(length=17)
    found = []
    threads = [threading.Thread(target=lambda: found.append(inductor.rope(q, k, cos, sin))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for each in found:
        torch.testing.assert_close(each, reference(q, k, cos, sin))


def test_one_forward_and_one_backward_are_compiled_for_all_sizes(traced):
    # Equal sizes first: what is equal by chance must not be taken to be equal always.
    for batch, length, heads in [(4, 4, (4, 4)), (2, 5, (3, 2)), (7, 64, (8, 2)), (3, 300, (2, 5))]:
        q, k, cos, sin = tensors(batch=batch, length=length, heads=heads)
        for _ in range(2):
            torch.autograd.grad(sum(y.square().sum() for y in inductor.rope(q, k, cos, sin)), (q, k))
    assert [each.compilations for each in inductor._fused._programs.values()] == [1, 1]


def test_a_batch_that_shares_no_dimension_is_one_program_with_a_batch_of_one(traced):
    for batch, length in ((1, 6), (3, 4)):
        inductor.rope(*tensors(batch=batch, length=length, tables=batch))
    assert len(inductor._fused._programs) == 1


def test_tables_that_enlarge_the_result_are_left_to_the_reference(ran):
    q, k, cos, sin = tensors(batch=1, tables=3)
    assert_right(q, k, cos, sin)
    assert not ran
