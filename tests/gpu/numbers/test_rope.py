"""RoPE in Triton: right in every variant and layout, in one launch, and the reference where that is not to be had."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import transformers
from support import rotations
from support.rotations import DIM, DTYPES, HALF, PAIRS, as_attention, heads_first, on, outcome, seen, tensors
from support.thorough import covering
from support.tiny import BASE, step
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fuseplug import KernelManager
from fuseplug.hookspecs import resolve
from fuseplug_rope.backends import triton
from fuseplug_rope.backends.triton import cutting, launch
from fuseplug_rope.kernels import TritonRoPEKernel
from fuseplug_rope.reference import VARIANTS
from fuseplug_rope.reference import rope as reference

# One for each way that planes are read and written, tables are indexed, and a rest is left over.
WAYS = [HALF, PAIRS, "half-partial", "interleaved-trailing", "interleaved-first-half-partial", "mla", "mla-full-table"]
FORWARD, BACKWARD = "forward", "backward"

assert_right = functools.partial(rotations.assert_right, triton.rope)


@pytest.fixture
def launched(monkeypatch):
    """What was launched: forward or backward."""
    started = []
    run = launch.rotate.launch

    def counted(results, *arguments):
        started.append(BACKWARD if arguments[-1] else FORWARD)
        run(results, *arguments)

    monkeypatch.setattr(launch.rotate, "launch", counted)
    return started


@pytest.fixture
def small_blocks(monkeypatch):
    """Programs that take two heads or two positions, so that there are several, the last of them with less to do."""
    monkeypatch.setattr(cutting, "_MOST_ELEMENTS", 2 * DIM)
    monkeypatch.setattr(cutting, "_ENOUGH_ELEMENTS", 4 * DIM)
    cutting.cut.cache_clear()
    yield
    cutting.cut.cache_clear()


@pytest.mark.parametrize(("variant", "dtypes"), covering(itertools.product(VARIANTS, DTYPES)), ids=str)
def test_every_variant_in_every_mix_of_dtypes(device, poisoned, launched, variant, dtypes):
    assert_right(device, tensors(variant, *dtypes), variant=variant)
    assert launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_of_the_tables_too(device, launched, variant):
    assert_right(device, [t.requires_grad_() for t in tensors(variant, torch.bfloat16)], variant=variant)
    assert launched == [FORWARD, BACKWARD]


SIZES = [
    {"batch": 3, "length": 3},
    {"batch": 1, "length": 3, "heads": (1, 1)},
    {"length": 2, "heads": (2, 5), "tables": 2},
    {"batch": 1, "length": 3, "dim": 12},
    {"length": 1, "dim": 40, "rest": 22},
]


@pytest.mark.parametrize(("variant", "sizes"), covering(itertools.product(WAYS, SIZES)), ids=str)
def test_several_programs_and_odd_sizes(device, poisoned, launched, small_blocks, variant, sizes):
    assert_right(device, tensors(variant, **sizes), variant=variant)
    assert launched == [FORWARD, BACKWARD]


# How x is seen from what a projection gives, how tables are from (tables, 1, sequence, angles), and what differs.
LAYOUTS = {
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
    "one head": (heads_first, lambda t: t, {"heads": (1, 1)}),
    "one head of k": (heads_first, lambda t: t, {"heads": (3, 1)}),
    "one of each": (heads_first, lambda t: t, {"batch": 1, "length": 1, "heads": (1, 1)}),
    "the last tokens": (lambda x: heads_first(x)[..., 2:, :], lambda t: t[..., 2:, :], {"tables": 2}),
    "part of wider rows": (lambda x: heads_first(torch.cat((x, x), -1)[..., :DIM]), lambda t: t, {}),
    "some heads of a wider projection": (lambda x: heads_first(torch.cat((x, x), 2))[:, 1:-1], lambda t: t, {}),
    "elements apart": (lambda x: heads_first(torch.stack((x, -x), -1)[..., 0]), lambda t: t, {}),
    "tokens within elements": (lambda x: heads_first(x).mT.contiguous().mT, lambda t: t, {}),
    "elements apart in the tables": (heads_first, lambda t: torch.stack((t, -t), -1)[..., 0], {}),
    "repeated": (lambda x: heads_first(x[:, :, :1].expand(-1, -1, 3, -1)), lambda t: t, {}),
    "a vector": (lambda x: x[0, 0, 0], lambda t: t[0, 0, 0], {}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", [HALF, "interleaved-first-half-partial"])
def test_any_layout(device, poisoned, launched, variant, layout):
    of_x, of_table, sizes = LAYOUTS[layout]
    assert_right(device, tensors(variant, **sizes), seen(of_x, of_table), variant)
    assert launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("variant", WAYS)
def test_nothing_is_written_beyond_the_results(device, small_blocks, variant):
    q, k, cos, sin = (t.detach() for t in on(device, tensors(variant, batch=1, length=3)))
    around = [torch.full((1, 5, x.shape[2] + 2, DIM + 4), 7.0, device=device) for x in (q, k)]
    within = [heads_first(each[:, 1:-1, 1:-1, 2:-2]) for each in around]
    launch.rotate.launch(within, heads_first(q), heads_first(k), cos, sin, q.dtype, k.dtype, variant, False)
    torch.testing.assert_close(tuple(within), reference(heads_first(q), heads_first(k), cos, sin, variant=variant))
    for each, inside in zip(around, within, strict=True):
        inside.fill_(7.0)
        assert (each == 7.0).all()


def test_tables_that_lie_differently_in_memory(device, launched):
    def see(q, k, cos, sin):
        return heads_first(q), heads_first(k), cos, torch.cat((sin, sin), -1)[..., : sin.shape[-1]]

    assert_right(device, tensors(tables=2), see)
    assert launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("variant", ["half-partial", "interleaved-trailing"])
def test_a_k_of_another_width(device, launched, variant):
    q, _, cos, sin = tensors(variant)
    _, k, _, _ = tensors(variant, dim=DIM + 6)
    assert_right(device, [q, k, cos, sin], variant=variant)
    assert launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("variant", ["half-promoting", "half-wide", "interleaved-wide", "half"])
def test_a_k_of_another_dtype(device, launched, variant):
    q, _, cos, sin = tensors(variant, torch.float16, torch.float32)
    _, k, _, _ = tensors(variant, torch.bfloat16)
    assert_right(device, [q, k, cos, sin], variant=variant)
    assert launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("variant", WAYS)
def test_one_tensor_alone(device, poisoned, launched, variant):
    q, _, cos, sin = tensors(variant)
    assert_right(device, [q, cos, sin], lambda q, cos, sin: (heads_first(q), None, cos, sin), variant)
    assert launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_result_lies_in_memory_as_the_references(device, launched, variant):
    q, k, cos, sin = (t.detach() for t in as_attention(*on(device, tensors(variant))))
    assert q.is_contiguous() is k.is_contiguous() is False
    for given in ((q, k), (q.contiguous(), k.contiguous())):
        expected = [y.stride() for y in reference(*given, cos, sin, variant=variant)]
        assert [y.stride() for y in triton.rope(*given, cos, sin, variant=variant)] == expected
    part = torch.cat((q, k), 1)[:, : q.shape[1]]
    assert triton.rope(part, None, cos, sin, variant=variant)[0].stride() == part.contiguous().stride()
    assert launched == [FORWARD] * 3


def test_what_was_given_is_as_it_was(device, launched):
    given = as_attention(*on(device, tensors()))
    before = [t.detach().clone() for t in given]
    q, k = triton.rope(*given)
    (q.sum() + k.sum()).backward()
    assert launched == [FORWARD, BACKWARD]
    assert all(map(torch.equal, given, before))


def test_gradients_that_are_expanded_or_strided(device, launched):
    leaves = on(device, tensors())

    def gradients(function):
        q, k = function(*as_attention(*leaves))
        return torch.autograd.grad(q.sum() + k.flip(-1)[..., ::2].square().sum(), leaves[:2])

    torch.testing.assert_close(gradients(triton.rope), gradients(reference))
    assert launched == [FORWARD, BACKWARD]


def test_a_backward_keeps_the_tables_alone(device):
    q, k, cos, sin = as_attention(*on(device, tensors()))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        triton.rope(q, k, cos, sin)
    assert [t.data_ptr() for t in kept] == [cos.data_ptr(), sin.data_ptr()]


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_needed(device, launched, monkeypatch, frozen):
    leaves = tensors()
    leaves[frozen].requires_grad_(False)
    assert [y.requires_grad for y in triton.rope(*as_attention(*on(device, leaves)))] == [frozen == 1, frozen == 0]
    given = []
    run = launch.rotate.launch
    monkeypatch.setattr(launch.rotate, "launch", lambda found, *rest: given.append(len(found)) or run(found, *rest))
    assert_right(device, leaves)
    assert given == [2, 1]


@pytest.mark.parametrize("tables_too", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_what_nobody_uses_has_no_gradient(device, launched, used, tables_too):
    """None, as in the original: zeros would let an optimizer's weight decay change what nobody trains."""
    q, k, cos, sin = as_attention(*on(device, tensors()))
    wanted = (q, k, cos, sin) if tables_too else (q, k)
    if tables_too:
        cos.requires_grad_()
        sin.requires_grad_()

    def gradients(function):
        return torch.autograd.grad(function(q, k, cos, sin)[used].square().sum(), wanted, allow_unused=True)

    found, expected = gradients(triton.rope), gradients(reference)
    assert found[1 - used] is None
    assert [each is None for each in found] == [each is None for each in expected]
    torch.testing.assert_close(found, expected)
    assert launched == [FORWARD, BACKWARD]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(device, launched, context):
    args = as_attention(*on(device, tensors()))
    with context():
        found = triton.rope(*args)
    torch.testing.assert_close(found, tuple(y.detach() for y in reference(*args)))
    assert found[0].grad_fn is None
    assert launched == [FORWARD]


BEYOND = {
    "float64": (HALF, as_attention, {"x": torch.float64}),
    "tables in float64": (HALF, as_attention, {"table": torch.float64}),
    "five dimensions": (HALF, seen(lambda x: torch.stack((x, -x)).transpose(2, 3), lambda t: t), {}),
    "an odd number": (HALF, as_attention, {"dim": 7}),
    "no tokens": (HALF, as_attention, {"length": 0}),
    "no batch": (PAIRS, as_attention, {"batch": 0}),
    "nothing to rotate": ("half-partial", as_attention, {"rest": DIM}),
    "tables that enlarge": (HALF, as_attention, {"batch": 1, "tables": 3}),
    "tables that enlarge k": (
        HALF,
        lambda q, k, *tables: (heads_first(q), heads_first(k)[:1], *tables),
        {"tables": 2, "heads": (3, 3)},
    ),
    "a table of more dimensions": (HALF, seen(lambda x: heads_first(x)[0], lambda t: t), {}),
    "a row for every head of every token": (
        HALF,
        seen(heads_first, lambda t: t.expand(2, 3, -1, -1)),
        {"heads": (3, 3)},
    ),
    "tables of two shapes": (HALF, lambda q, k, cos, sin: (heads_first(q), heads_first(k), cos, sin[0]), {}),
}


@pytest.mark.parametrize("case", BEYOND)
def test_beyond_one_launch_it_is_the_reference(device, launched, case):
    variant, see, sizes = BEYOND[case]
    assert_right(device, tensors(variant, **sizes), see, variant)
    assert launched == []


def test_a_k_of_other_tokens_is_the_reference(device, launched):
    q, k, _, _ = tensors(length=4)
    cos, sin = (t[:, :, :1] for t in tensors()[2:])
    assert_right(device, [q, k, cos, sin], lambda q, k, *tables: (heads_first(q), heads_first(k)[..., :2, :], *tables))
    assert launched == []


@pytest.mark.parametrize("variant", ["nothing", HALF])
def test_what_does_not_fit_is_said_as_by_the_reference(device, variant):
    q, k, cos, sin = as_attention(*on(device, tensors(length=3)))
    said = []
    for function in (triton.rope, reference):
        with pytest.raises(ValueError, match="variant") as error:
            function(q, k, cos[..., :-2], sin[..., :-2], variant=variant)
        said.append(str(error.value))
    assert said[0] == said[1]


def test_transforms_tracers_and_subclasses_see_the_reference(device, launched):
    q, _, cos, sin = (t.detach() for t in as_attention(*on(device, tensors())))

    class Own(torch.Tensor):
        pass

    def ours(q): return triton.rope(q, None, cos, sin)[0]  # fmt: skip

    def theirs(q): return reference(q, None, cos, sin)[0]  # fmt: skip

    for transform in (
        torch.vmap,
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
        lambda f: torch.jit.trace(f, (q,), check_trace=False),
        lambda f: lambda x: f(x.as_subclass(Own)).as_subclass(torch.Tensor),
    ):
        torch.testing.assert_close(transform(ours)(q), transform(theirs)(q))
    assert launched == []


def test_gradients_of_a_batch_of_gradients(device, launched):
    q, k, cos, sin = as_attention(*on(device, tensors()))
    grads = torch.randn(3, *q.shape, device=device)
    found = [
        torch.autograd.grad(function(q, k, cos, sin)[0], q, grads, is_grads_batched=True)[0]
        for function in (triton.rope, reference)
    ]
    torch.testing.assert_close(*found)
    assert launched == [FORWARD]


def test_autocast_changes_the_matrix_form_alone(device, launched):
    expected = []
    for variant in (HALF, "interleaved-matrix"):
        args = [t.detach() for t in as_attention(*on(device, tensors(variant, torch.bfloat16)))]
        with torch.autocast(device, dtype=torch.bfloat16):
            found, theirs = (function(*args, variant=variant) for function in (triton.rope, reference))
        torch.testing.assert_close(found, theirs, rtol=2**-6, atol=2**-6)
        expected += [FORWARD] * (variant == HALF)
        assert launched == expected


@pytest.mark.parametrize("tables_need", [False, True])
@pytest.mark.parametrize("frozen", [None, 0, 1])
@pytest.mark.parametrize("variant", [HALF, PAIRS, "mla"])
def test_double_backward(device, launched, variant, frozen, tables_need):
    found = []
    for function in (triton.rope, reference):
        leaves = on(device, tensors(variant))
        for table in leaves[2:]:
            table.requires_grad_(tables_need)
        if frozen is not None:
            leaves[frozen].requires_grad_(False)
        wanted = [t for t in leaves if t.requires_grad]
        loss = sum(y.square().sum() for y in function(*as_attention(*leaves), variant=variant))
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), wanted))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert launched == [FORWARD, BACKWARD]  # of the values, at last


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(device, launched, use_reentrant):
    leaves = on(device, tensors())
    out, _ = checkpoint(triton.rope, *as_attention(*leaves), use_reentrant=use_reentrant)
    found = torch.autograd.grad(out.sum(), leaves[0]) if not use_reentrant else (out.sum().backward(), leaves[0].grad)
    expected = torch.autograd.grad(reference(*as_attention(*leaves))[0].sum(), leaves[0])
    torch.testing.assert_close(found[-1], expected[0])
    assert launched == [FORWARD, FORWARD, BACKWARD]


def test_values_that_are_not_finite(device, launched):
    q, k, cos, sin = (t.detach() for t in as_attention(*on(device, tensors())))
    q[0, 0, 0, 3], q[0, 1, 1, 2], k[1, 1, 4, 9] = float("nan"), float("inf"), -float("inf")
    torch.testing.assert_close(triton.rope(q, k, cos, sin), reference(q, k, cos, sin), equal_nan=True)
    assert launched == [FORWARD]


def test_results_repeat_to_the_bit(device, small_blocks):
    leaves = on(device, [t.requires_grad_() for t in tensors(x=torch.bfloat16)])
    once, again = (outcome(triton.rope, leaves, as_attention) for _ in range(2))
    assert all(map(torch.equal, once, again))


class Rotates(nn.Module):
    variant = HALF

    def forward(self, q, k, cos, sin):
        return triton.rope(q, k, cos, sin, variant=self.variant)


@pytest.mark.parametrize("variant", WAYS)
def test_compiles_as_one_graph_with_its_gradients(device, launched, variant):
    torch.compiler.reset()
    leaves = on(device, tensors(variant, torch.bfloat16))
    compiled = torch.compile(functools.partial(triton.rope, variant=variant), fullgraph=True, backend="aot_eager")
    found = outcome(compiled, leaves, as_attention)
    assert launched == [FORWARD, BACKWARD]
    expected = outcome(functools.partial(triton.rope, variant=variant), leaves, as_attention)
    assert all(map(torch.equal, found, expected))


def test_sizes_that_change_are_compiled_once(device, launched):
    torch.compiler.reset()
    graphs = []
    compiled = torch.compile(
        triton.rope, fullgraph=True, dynamic=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
    )
    for batch, length in ((4, 5), (6, 7), (8, 11)):
        args = [t.detach() for t in as_attention(*on(device, tensors(batch=batch, length=length)))]
        torch.testing.assert_close(compiled(*args), reference(*args))
    assert len(graphs) == 1
    assert launched == [FORWARD] * 3


def test_exports(device, launched):
    args = tuple(t.detach() for t in as_attention(*on(device, tensors())))
    program = torch.export.export(Rotates(), args)
    assert "fuseplug_rope.rotate.default" in str(program.graph)
    assert launched == []
    torch.testing.assert_close(program.module()(*args), reference(*args))
    assert launched == [FORWARD]


def test_fake_tensors_are_not_read(device, launched):
    leaves = tensors("half-promoting", torch.bfloat16, torch.float32)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = as_attention(*[torch.empty_like(t, device=device, requires_grad=t.requires_grad) for t in leaves])
        found = triton.rope(*fakes, variant="half-promoting")
        grads = torch.autograd.grad(sum(y.sum() for y in found), fakes[:2])
    for x, y, grad in zip(fakes, found, grads, strict=False):
        assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype) == (grad.shape, x.stride(), grad.dtype)
    assert launched == []


@pytest.mark.parametrize("transposed", [False, True])
def test_passes_the_checks_of_torch(device, transposed):
    q, k, cos, sin = (t.detach() for t in as_attention(*on(device, tensors())))
    for other in (k, None):
        torch.library.opcheck(launch.rotate.op, (q, other, cos, sin, torch.bfloat16, torch.float32, HALF, transposed))


def test_rows_that_are_far_apart(device):
    """Further than a number of 32 bits says; only what is written takes memory."""
    q, _, cos, sin = (t.detach() for t in on(device, tensors(batch=1, length=3)))
    far = torch.empty(1, dtype=torch.int8, device=device).new_empty(9 << 30).view(torch.float32)
    far = far.as_strided(q.shape, (1, 1 << 30, DIM, 1)).copy_(q)
    torch.testing.assert_close(triton.rope(heads_first(far), None, cos, sin), reference(heads_first(q), None, cos, sin))


# One for each way that an adapter calls the kernel: the rest is numbers, which are tested above.
CALLERS = ["Half", "Complex", "OwnMethod"]


@pytest.mark.parametrize("name", CALLERS)
def test_modules_are_fused_and_undone(device, launched, name):
    torch.manual_seed(0)
    module = next(each for each in resolve(TritonRoPEKernel.specimens)() if type(each).__name__ == name).to(device)
    hidden = torch.randn(2, 3, 8, device=device)
    expected = module(hidden)
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": "triton_fused_rope"})
    with manager.apply_all(module) as applied:
        assert [entry.check for entry in applied.report.fused] == ["passed"], applied.report
        launched.clear()
        torch.testing.assert_close(module(hidden), expected)
        assert set(launched) == {FORWARD}
    launched.clear()
    torch.testing.assert_close(module(hidden), expected, rtol=0, atol=0)
    assert launched == []


def test_a_model_is_fused_and_learns_what_it_did(device, launched):
    config = transformers.LlamaConfig(**(BASE | {"num_hidden_layers": 1}))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    expected = step(model)
    applied = KernelManager(environ={"FUSEPLUG_KERNELS": "triton_fused_rope"}).apply_all(model)
    assert {(entry.kernel_id, entry.variant) for entry in applied.report.fused} == {("triton_fused_rope", HALF)}
    launched.clear()
    torch.testing.assert_close(step(model), expected, rtol=1e-4, atol=1e-5)
    assert launched == [FORWARD, BACKWARD]
