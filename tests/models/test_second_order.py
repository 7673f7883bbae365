"""Second derivatives of Inductor's programs, in every dtype and several at once, are those of the original."""

import functools
import itertools

import pytest
import torch
from support.mixtures import arguments
from support.thorough import quick_if, thorough
from support.tiny import build
from torch.utils.checkpoint import checkpoint

from fuseplug import KernelManager
from fuseplug_backends.inductor import Program
from fuseplug_linear_cross_entropy import reference as loss_reference
from fuseplug_linear_cross_entropy.backends import inductor as loss
from fuseplug_moe import reference as moe_reference
from fuseplug_moe.backends import inductor as moe
from fuseplug_rmsnorm import reference as norm_reference
from fuseplug_rmsnorm.backends import inductor as norm
from fuseplug_rmsnorm.kernels import InductorRMSNormKernel
from fuseplug_rope import reference as rope_reference
from fuseplug_rope.backends import inductor as rope
from fuseplug_swiglu import reference as gate_reference
from fuseplug_swiglu.backends import inductor as gate

pytestmark = pytest.mark.skipif(
    InductorRMSNormKernel().unavailable("cpu") is not None, reason="Inductor needs a C++ compiler"
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDINGS = 16
"""As for a mixture, the longest chain in docs/tolerances.md, because second derivatives are compared."""


@pytest.fixture
def started(everything_compiled, monkeypatch):
    """The programs that were started."""
    programs, call = [], Program.__call__

    def counted(self, *tensors):
        programs.append(self)
        return call(self, *tensors)

    monkeypatch.setattr(Program, "__call__", counted)
    return programs


def some(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rotated(function, q, k, cos, sin):
    return sum(y.square().sum() for y in function(q, k, cos, sin, variant="half"))


def tables(*shape):
    angles = some(*shape, seed=2)
    return {"cos": angles.cos(), "sin": angles.sin()}


def mixture(function, **tensors):
    return function(**tensors, top_k_index=arguments()["top_k_index"]).square().sum()


def experts():
    return {n: t.detach() for n, t in arguments().items() if n != "top_k_index"}


def normed(variant):
    gate = {"gate": some(2, 3, 32, seed=2)} if variant.startswith("gated") else {}
    return (
        lambda function, **tensors: function(**tensors, variant=variant).square().sum(),
        (norm.rms_norm, norm_reference.rms_norm),
        lambda: {"x": some(2, 3, 32), "weight": some(32, seed=1), **gate},
    )


# For each op: a scalar of a function's results, the compiled function and its reference, and its tensors.
OPS = {
    **{f"rmsnorm, {variant}": normed(variant) for variant in ("llama", "gemma", "cast-last", "gated-silu")},
    "swiglu": (
        lambda function, gate, up: function(gate, up).square().sum(),
        (gate.swiglu, gate_reference.swiglu),
        lambda: {"gate": some(2, 3, 32), "up": some(2, 3, 32, seed=1)},
    ),
    "swiglu, wide": (
        lambda function, gate, up: function(gate, up, variant="wide").square().sum(),
        (gate.swiglu, gate_reference.swiglu),
        lambda: {"gate": some(2, 3, 32), "up": some(2, 3, 32, seed=1)},
    ),
    "rope": (
        rotated,
        (rope.rope, rope_reference.rope),
        lambda: {"q": some(2, 4, 5, 16), "k": some(2, 2, 5, 16, seed=1), **tables(2, 1, 5, 16)},
    ),
    "moe": (mixture, (moe.moe, moe_reference.moe), experts),
    "linear_cross_entropy": (
        lambda function, hidden, weight: function(hidden, weight, torch.arange(6) * 7).square(),
        (loss.linear_cross_entropy, loss_reference.linear_cross_entropy),
        lambda: {"hidden": some(6, 16), "weight": some(48, 16, seed=1)},
    ),
}


def penalty(scalar, tensors, wanted):
    """The gradients of a norm of the gradients of *scalar*."""
    leaves = {name: t.detach().clone().requires_grad_(name in wanted) for name, t in tensors.items()}
    of = [leaves[name] for name in wanted]
    first = torch.autograd.grad(scalar(**leaves), of, create_graph=True)
    # Scaled, so that no square of a float16 gradient is infinite, and in float64, so that only the derivatives round.
    total = sum((g.double() / 16).square().sum() for g in first)
    return torch.autograd.grad(total, of, allow_unused=True)


def assert_as_right(found, original, truth, dtype):
    """Compare by tensor, within docs/tolerances.md: the second derivative of a row sums over all other rows."""
    for one, other, true in zip(found, original, truth, strict=True):
        assert (one is None) == (other is None)
        if one is None:
            continue
        assert one.dtype == other.dtype
        error, allowed = ((t.double() - true).abs().max().item() for t in (one, other))
        eps = torch.finfo(dtype).eps
        assert error <= max(2 * allowed, ROUNDINGS * eps * true.abs().max().item()), (error, allowed)


@pytest.mark.parametrize(
    ("op", "dtype"), quick_if(itertools.product(OPS, DTYPES), {("swiglu", torch.bfloat16)}), ids=str
)
def test_a_penalty_on_gradients_has_the_gradients_of_the_original(started, op, dtype):
    scalar, (fused, reference), make = OPS[op]
    tensors = {name: t.to(dtype) for name, t in make().items()}
    for wanted in [[*tensors], *([name] for name in tensors)]:
        truth = penalty(functools.partial(scalar, reference), {n: t.double() for n, t in tensors.items()}, wanted)
        original = penalty(functools.partial(scalar, reference), tensors, wanted)
        assert_as_right(penalty(functools.partial(scalar, fused), tensors, wanted), original, truth, dtype)
    assert bool(started) == (op != "linear_cross_entropy" or dtype is not torch.float16)


@pytest.mark.parametrize("op", OPS)
def test_several_gradients_at_once_are_those_of_one_after_the_other(op):
    """``jacobian(vectorize=True)`` asks for a batch of gradients, which has no memory that a program could read."""
    scalar, (fused, _), make = OPS[op]
    leaves = {name: t.requires_grad_() for name, t in make().items()}
    total, upstream = scalar(fused, **leaves), torch.tensor([1.0, -0.5, 2.0])
    batch = torch.autograd.grad(total, [*leaves.values()], upstream, is_grads_batched=True, retain_graph=True)
    single = [torch.autograd.grad(total, [*leaves.values()], factor, retain_graph=True) for factor in upstream]
    torch.testing.assert_close(batch, tuple(map(torch.stack, zip(*single, strict=True))))


@thorough
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_else_differentiates_twice(started, dtype):
    x, weight = some(4, 8).to(dtype), some(8, seed=1).to(dtype)

    def total(function, x, weight):
        return function(x, weight).square().sum()

    for compute in (
        lambda f: torch.autograd.functional.hessian(lambda w: total(f, x, w), weight),
        lambda f: torch.autograd.functional.hessian(lambda x: total(f, x, weight), x),
        lambda f: torch.autograd.functional.hvp(lambda x, w: total(f, x, w), (x, weight), (x, weight))[1][0],
        lambda f: torch.autograd.functional.vhp(lambda x, w: total(f, x, w), (x, weight), (x, weight))[1][1],
    ):
        truth, original, found = (
            [compute(f)] if f is not None else [compute(lambda x, w: norm_reference.rms_norm(x.double(), w.double()))]
            for f in (None, norm_reference.rms_norm, norm.rms_norm)
        )
        assert_as_right(found, original, [t.double() for t in truth], dtype)
    assert started


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpointing(started, use_reentrant):
    """A backward that starts another, as that of a reentrant checkpoint does, cannot be differentiated by torch."""
    tensors = {"x": some(6, 32).bfloat16(), "weight": some(32, seed=1).bfloat16()}

    def scalar(function, x, weight):
        return checkpoint(function, x, weight, use_reentrant=use_reentrant).square().sum()

    results = []
    for function in (norm.rms_norm, norm_reference.rms_norm):
        try:
            results.append(penalty(functools.partial(scalar, function), tensors, [*tensors]))
        except RuntimeError as error:
            results.append(str(error))
    if use_reentrant:
        assert isinstance(results[1], str)
        assert results[0] == results[1]
    else:
        wide = {name: t.double() for name, t in tensors.items()}
        truth = penalty(functools.partial(scalar, norm_reference.rms_norm), wide, [*tensors])
        assert_as_right(*results, truth, torch.bfloat16)
    assert started


def test_what_is_written_into_an_input_meanwhile_changes_nothing(started):
    """In half precision, the original keeps a float32 copy of its input."""
    found = []
    for overwritten in (False, True):
        leaf, weight = (t.bfloat16().requires_grad_() for t in (some(6, 32), some(32, seed=1)))
        x = leaf * 1
        y = norm.rms_norm(x, weight)
        if overwritten:
            with torch.no_grad():
                x.zero_()
        first = torch.autograd.grad(y.square().sum(), (leaf, weight), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), (leaf, weight)))
    assert all(map(torch.equal, *found))
    assert started


def test_under_autocast(started):
    """A gradient is computed again in the dtypes of the forward, which ignored autocast."""
    found = []
    for enabled in (False, True):
        leaves = {name: t.requires_grad_() for name, t in experts().items()}
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            total = mixture(moe.moe, **leaves)
            first = torch.autograd.grad(total, [*leaves.values()], create_graph=True)
        # Outside autocast: a backward that starts under autocast follows its rules, whoever computed the forward.
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), [*leaves.values()]))
    assert all(map(torch.equal, *found))
    assert started


@thorough
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize(("name", "dtype"), itertools.product(("llama", "qwen3_moe"), DTYPES), ids=str)
def test_a_gradient_penalty_trains_a_model_as_it_does_unfused(started, name, dtype, frozen):
    """All ops are fused, also if the norms are frozen, so that their weights need no gradients."""
    one_layer = {"num_hidden_layers": 1, "attn_implementation": "eager"}  # flash attention has no second derivative
    model, wide = build(name, dtype, **one_layer), build(name, dtype, **one_layer).double()
    for plain in (model, wide):
        if hasattr(plain, "set_experts_implementation"):  # the default one does not support float64
            plain.set_experts_implementation("eager")
    if frozen:
        for parameter in (p for m in (model, wide) for n, p in m.named_parameters() if "norm" in n):
            parameter.requires_grad_(False)
    original, truth = gradient_penalty(model), gradient_penalty(wide)
    manager = KernelManager(environ={})
    applied = manager.apply_all(model, allow="lazy_logits", verify=False, every_size=True)
    found = gradient_penalty(model)
    computed = {calls.kernel_id for calls in applied.calls() if calls.fused}
    ops = {"rmsnorm", "swiglu" if name == "llama" else "moe", "rope", "linear_cross_entropy"}
    assert {kernel_id.removeprefix("inductor_fused_") for kernel_id in computed} == ops, applied.calls()
    assert_as_right(found, original, truth, dtype)
    assert started


def gradient_penalty(model):
    """The gradients of a loss with a penalty on its gradient at the embeddings."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    ids = torch.arange(3, 19).reshape(2, 8)  # no padding, because its row of the embedding is zero
    # Rows of about 1. For smaller rows, the second derivative of a norm is infinite in float16, unfused as well.
    embedded = 64 * model.get_input_embeddings()(ids)
    total = model(inputs_embeds=embedded, labels=ids).loss
    (first,) = torch.autograd.grad(total, embedded, create_graph=True)
    penalised = total.double() + (8 * first.double()).square().sum()
    return torch.autograd.grad(penalised, parameters, allow_unused=True)
