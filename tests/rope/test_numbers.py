"""RoPE on each backend: values and gradients in every variant and layout, and the calls left to the reference."""

import functools
import itertools

import pytest
import torch
from support import backends, rotations
from support.rotations import (
    DIM,
    DTYPES,
    HALF,
    LAYOUTS,
    PAIRS,
    WAYS,
    as_attention,
    heads_first,
    on,
    outcome,
    seen,
    tensors,
)
from support.thorough import covering, few_on
from support.transforms import TRANSFORMS
from torch.utils.checkpoint import checkpoint

from fuseplug_rope.reference import VARIANTS
from fuseplug_rope.reference import rope as reference


@pytest.fixture
def rope(backend):
    return backend.module("rope").rope


@pytest.fixture
def check(backend, rope):
    return functools.partial(rotations.assert_right, rope, backend.device)


@pytest.mark.parametrize(
    ("variant", "dtypes"), covering(itertools.product(WAYS if backends.NAME == "triton" else VARIANTS, DTYPES)), ids=str
)
def test_every_variant_in_every_mix_of_dtypes(backend, check, variant, dtypes):
    check(tensors(variant, *dtypes), variant=variant)
    assert backend.launches or backend.name == "inductor"  # Inductor leaves some pairs to PyTorch


@pytest.mark.parametrize("variant", few_on("triton", [*WAYS, *(name for name in VARIANTS if name not in WAYS)], 7))
def test_gradients_of_the_tables_too(check, variant):
    check([t.requires_grad_() for t in tensors(variant, torch.bfloat16)], variant=variant)


@pytest.mark.parametrize(("variant", "sizes"), covering(itertools.product(WAYS, rotations.SIZES)), ids=str)
def test_odd_sizes(check, variant, sizes):
    check(tensors(variant, **sizes), variant=variant)


@pytest.mark.parametrize(
    ("variant", "layout"),
    covering(
        itertools.product([HALF, "interleaved-first-half-partial"] if backends.NAME == "triton" else WAYS, LAYOUTS)
    ),
)
def test_any_layout(check, variant, layout):
    of_x, of_table, sizes = LAYOUTS[layout]
    leaves = tensors(variant, **sizes)
    before = [t.detach().clone() for t in leaves]
    check(leaves, seen(of_x, of_table), variant)
    assert all(map(torch.equal, leaves, before))


@pytest.mark.parametrize("case", rotations.RARE)
def test_what_is_rare_is_right(check, case):
    variant, see, sizes = rotations.RARE[case]
    check(tensors(variant, **sizes), see, variant)


@pytest.mark.parametrize("variant", ["half-promoting", "half-wide", "interleaved-wide", "half"])
def test_a_k_of_another_dtype(check, variant):
    q, _, cos, sin = tensors(variant, torch.float16, torch.float32)
    _, k, _, _ = tensors(variant, torch.bfloat16)
    check([q, k, cos, sin], variant=variant)


@pytest.mark.parametrize("variant", ["half-partial", "interleaved-trailing"])
def test_a_k_of_another_width(check, variant):
    q, _, cos, sin = tensors(variant)
    _, k, _, _ = tensors(variant, dim=DIM + 6)
    check([q, k, cos, sin], variant=variant)


@pytest.mark.parametrize("variant", WAYS)
def test_one_tensor_alone(check, variant):
    q, _, cos, sin = tensors(variant)
    check([q, cos, sin], lambda q, cos, sin: (heads_first(q), None, cos, sin), variant)


def test_gradients_that_are_expanded_or_strided(backend, rope):
    leaves = on(backend.device, tensors())

    def gradients(function):
        q, k = function(*as_attention(*leaves))
        return torch.autograd.grad(q.sum() + k.flip(-1)[..., ::2].square().sum(), leaves[:2])

    torch.testing.assert_close(gradients(rope), gradients(reference))


def test_a_backward_keeps_the_tables_alone(backend, rope):
    q, k, cos, sin = as_attention(*on(backend.device, tensors()))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope(q, k, cos, sin)
    assert {t.untyped_storage().data_ptr() for t in kept} == {t.untyped_storage().data_ptr() for t in (cos, sin)}


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_needed(backend, rope, check, frozen):
    leaves = tensors()
    leaves[frozen].requires_grad_(False)
    results = rope(*as_attention(*on(backend.device, leaves)))
    assert [y.requires_grad for y in results] == [frozen == 1, frozen == 0]
    check(leaves)


@pytest.mark.parametrize("tables_too", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_what_nobody_uses_has_no_gradient(backend, rope, used, tables_too):
    """The gradient is None, as in the original: with zeros, weight decay would change what nobody trains."""
    q, k, cos, sin = as_attention(*on(backend.device, tensors()))
    wanted = (q, k, cos.requires_grad_(), sin.requires_grad_()) if tables_too else (q, k)

    def gradients(function):
        return torch.autograd.grad(function(q, k, cos, sin)[used].square().sum(), wanted, allow_unused=True)

    ours, theirs = gradients(rope), gradients(reference)
    assert ours[1 - used] is None
    assert [t is None for t in ours] == [t is None for t in theirs]
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_where_no_gradient_is_wanted(backend, rope, context):
    arguments = as_attention(*on(backend.device, tensors()))
    with context():
        results = rope(*arguments)
    torch.testing.assert_close(results, tuple(y.detach() for y in reference(*arguments)))
    assert results[0].grad_fn is None


@pytest.mark.skipif(backends.NAME == "npu", reason="one operation there, of which only some results lie so")
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_result_lies_in_memory_as_the_references(backend, rope, variant):
    q, k, cos, sin = (t.detach() for t in as_attention(*on(backend.device, tensors(variant, batch=2, length=3))))
    for pair in ((q, k), (q.contiguous(), k.contiguous())):
        expected = [y.stride() for y in reference(*pair, cos, sin, variant=variant)]
        assert [y.stride() for y in rope(*pair, cos, sin, variant=variant)] == expected


@pytest.mark.skipif(backends.NAME == "npu", reason="one operation there, of which only some results lie so")
@pytest.mark.parametrize("lie", [lambda q, k: (q, k.contiguous()), lambda q, k: (q.mT.contiguous().mT, k)])
def test_each_result_lies_in_memory_as_its_own_tensor(backend, rope, lie):
    q, k, cos, sin = as_attention(*on(backend.device, tensors(batch=2, length=3)))
    results, expected = (function(*lie(q, k), cos, sin) for function in (rope, reference))
    assert [y.stride() for y in results] == [y.stride() for y in expected]
    ours, theirs = (torch.autograd.grad(ys[0].square().sum(), q) for ys in (results, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("variant", ["nothing", HALF])
def test_what_does_not_fit_is_said_as_by_the_reference(backend, rope, variant):
    q, k, cos, sin = as_attention(*on(backend.device, tensors(length=3)))
    messages = []
    for function in (rope, reference):
        with pytest.raises(ValueError, match="variant") as error:
            function(q, k, cos[..., :-2], sin[..., :-2], variant=variant)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_see_the_reference(backend, rope, transform):
    q, _, cos, sin = (t.detach() for t in as_attention(*on(backend.device, tensors())))
    ours, theirs = (transform(lambda q, f=f: f(q, None, cos[0], sin[0])[0]) for f in (rope, reference))
    torch.testing.assert_close(ours(q), theirs(q))
    assert not backend.launches


def test_autocast_changes_the_matrix_form_alone(backend, rope):
    for variant in (HALF, "interleaved-matrix"):
        arguments = [t.detach() for t in as_attention(*on(backend.device, tensors(variant, torch.bfloat16)))]
        with torch.autocast(backend.device, dtype=torch.bfloat16):
            ours, theirs = (function(*arguments, variant=variant) for function in (rope, reference))
        assert [t.dtype for t in ours] == [t.dtype for t in theirs]
        torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("tables_need", [False, True])
@pytest.mark.parametrize("frozen", [None, 0])
@pytest.mark.parametrize("variant", few_on("triton", [HALF, PAIRS, "mla"], 2))
def test_double_backward(backend, rope, variant, frozen, tables_need):
    def twice(function):
        leaves = on(backend.device, tensors(variant))
        for table in leaves[2:]:
            table.requires_grad_(tables_need)
        if frozen is not None:
            leaves[frozen].requires_grad_(False)
        wanted = [t for t in leaves if t.requires_grad]
        loss = sum(y.square().sum() for y in function(*as_attention(*leaves), variant=variant))
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        return torch.autograd.grad(sum(g.sin().sum() for g in first), wanted)

    torch.testing.assert_close(twice(rope), twice(reference), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing(backend, rope, use_reentrant):
    leaves = on(backend.device, tensors())
    checkpoint(rope, *as_attention(*leaves), use_reentrant=use_reentrant)[0].sum().backward()
    (expected,) = torch.autograd.grad(reference(*as_attention(*leaves))[0].sum(), leaves[0])
    torch.testing.assert_close(leaves[0].grad, expected)


def test_values_that_are_not_finite(backend, rope):
    q, k, cos, sin = (t.detach() for t in as_attention(*on(backend.device, tensors())))
    q[0, 0, 0, 3], q[0, 1, 1, 2], k[1, 1, 4, 9] = float("nan"), float("inf"), -float("inf")
    torch.testing.assert_close(rope(q, k, cos, sin), reference(q, k, cos, sin), equal_nan=True)


def test_results_repeat_to_the_bit(backend, rope):
    leaves = on(backend.device, [t.requires_grad_() for t in tensors(x=torch.bfloat16)])
    once, again = (outcome(rope, leaves, as_attention) for _ in range(2))
    assert all(map(torch.equal, once, again))


@pytest.mark.parametrize("variant", few_on("triton", [HALF, PAIRS, "mla"], 2))
def test_compiles_as_one_graph_with_its_gradients(backend, rope, variant):
    torch.compiler.reset()
    leaves = on(backend.device, tensors(variant, torch.bfloat16))
    function = functools.partial(rope, variant=variant)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    backend.clear()
    ours = outcome(compiled, leaves, as_attention)
    assert bool(backend.launches) == (backend.name != "inductor")  # left for the compiler around it to fuse further
    torch.testing.assert_close(ours, outcome(function, leaves, as_attention), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_fake_tensors_of_a_real_size(fake_backend, variant):
    rope = fake_backend.module("rope").rope
    shapes = tensors(variant, torch.bfloat16, batch=4, length=4096, heads=(32, 8), dim=128, rest=64)
    leaves = [
        torch.empty(t.shape, dtype=t.dtype, device=fake_backend.device, requires_grad=t.requires_grad) for t in shapes
    ]
    results = rope(*as_attention(*leaves), variant=variant)
    sum(y.sum() for y in results).backward()
    for x, y in zip(leaves[:2], results, strict=True):
        assert (y.shape, y.device.type) == (x.transpose(1, 2).shape, fake_backend.device)
        assert (x.grad.shape, x.grad.dtype) == (x.shape, x.dtype)
