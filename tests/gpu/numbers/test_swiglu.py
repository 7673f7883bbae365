"""Gated MLPs by Triton: right in every variant and layout, values and gradients, and really by the kernels."""

from __future__ import annotations

import inspect
import itertools
import math
import re

import pytest
import torch
from support.judging import outcome
from support.thorough import covering, thorough
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from fuseplug import KernelManager
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.triton import FORMULAS
from fuseplug_backends.triton.activations import activate
from fuseplug_swiglu import reference
from fuseplug_swiglu.backends.triton import launches, swiglu
from fuseplug_swiglu.reference import LAYOUTS, VARIANTS
from fuseplug_swiglu.specimens.activations import ReLU2
from fuseplug_swiglu.specimens.mlps import HIDDEN, Clamped, InOne, Multiplied, Offset, Separate, Sparse, Wide
from fuseplug_verify import Tolerance

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")  # in exp, by the interpreter, on the way to 0

HALF, BF16, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPES = (BF16, HALF, SINGLE)
NUMBERS = {"limit": 0.75, "scale": 0.4, "sparsity": 0.6}
TOLERANCE = Tolerance(roundings=1.0, working_roundings=16.0)
"""One rounding to the dtype of a result, and those of the arithmetic of an element in float32."""

BOTH = ["forward", "backward"]
INNER = 13
LIMIT = NUMBERS["limit"]
SERVED = [name for name, row in ACTIVATIONS.items() if row.formula in FORMULAS]
"""Others are declined: tests/backends/test_one_row.py."""


def options(activation="silu", variant="plain", layout=None, **others):
    found = {"activation": activation, "variant": variant, "beta": 1.25}
    found |= {} if layout is None else {"layout": layout}
    return found | {name: NUMBERS[name] for name in VARIANTS[variant].needs} | others


def tensors(layout=None, dtype=SINGLE, up=None, shape=(3, INNER)):
    """Gate and up, or both in one: a row where limits are met, one near zero, one of zeros."""
    generator = torch.Generator().manual_seed(0)
    magnitudes = torch.tensor((3.0, 0.25, 0.0)).repeat(shape[-2])[: shape[-2], None] if len(shape) > 1 else 1.0
    shape = (*shape[:-1], shape[-1] * (1 if layout is None else 2))
    dtypes = {"gate": dtype, "up": up or dtype} if layout is None else {"gate": dtype}
    return {name: (magnitudes * torch.randn(shape, generator=generator)).to(which) for name, which in dtypes.items()}


def both(view=lambda x: x, **how):
    """The kernel and the reference, of a view of each tensor."""

    def called(function):
        return lambda **given: function(**{name: view(t) for name, t in given.items()}, **how)

    return called(swiglu), called(reference.swiglu)


def assert_right(ours, theirs, given, device):
    found, original = outcome(ours, given, device), outcome(theirs, given)
    for name, value in original.values.items():
        assert found.values[name].dtype is value.dtype
        assert found.values[name].shape == value.shape
    why = TOLERANCE.excess(found, original, outcome(theirs, given, dtype=DOUBLE))
    assert not why, why


@pytest.fixture
def launched(monkeypatch):
    """The kernels that are started, by name."""
    started = []
    for operation in (launches.gated, launches.gated_backward):

        def launch(*arguments, run=operation.launch):
            started.append("forward" if run.__name__ == "gated" else "backward")
            run(*arguments)

        monkeypatch.setattr(operation, "launch", launch)
    return started


def test_the_formulas_that_are_served_are_those_of_the_program():
    assert set(re.findall(r'FORMULA == "(\w+)"', inspect.getsource(activate.fn))) == FORMULAS


@pytest.mark.parametrize(
    ("activation", "variant", "dtype"), covering(itertools.product(SERVED, VARIANTS, DTYPES)), ids=str
)
def test_every_activation_and_variant_in_every_dtype(device, poisoned, launched, activation, variant, dtype):
    assert_right(*both(**options(activation, variant)), tensors(dtype=dtype), device)
    assert launched == BOTH


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_every_layout(device, poisoned, launched, activation, variant, layout):
    dtypes = itertools.cycle(DTYPES)
    for _ in range(1 + list(VARIANTS).index(variant) + LAYOUTS.index(layout)):
        dtype = next(dtypes)
    assert_right(*both(**options(activation, variant, layout)), tensors(layout, dtype), device)
    assert launched == BOTH


@pytest.mark.parametrize("dtypes", [(BF16, SINGLE), (SINGLE, BF16), (HALF, BF16)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_gate_and_up_of_two_dtypes(device, poisoned, launched, variant, dtypes):
    assert_right(*both(**options(variant=variant)), tensors(None, *dtypes), device)
    assert launched == BOTH


@pytest.mark.parametrize("shape", [(1, INNER), (1, 1), (4, 1), (INNER,), (1,), (2, 2, 1, 16), (1, 1100), (2, 1024)])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_every_number_of_rows_and_columns(device, poisoned, launched, layout, shape):
    assert_right(*both(**options("gelu", layout=layout)), tensors(layout, shape=shape), device)
    assert launched == BOTH


@pytest.mark.parametrize("shape", [(0, INNER), (3, 0, INNER), (3, 0)])
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_of_nothing_is_nothing(device, layout, shape):
    assert_right(*both(**options(layout=layout)), tensors(layout, shape=shape), device)


VIEWS = {
    "transposed": lambda x: x.transpose(0, 1),
    "every other row": lambda x: x[:, ::2],
    "every other column": lambda x: x[..., ::2],
    "columns of wider rows": lambda x: x[..., 4:10],
    "columns of wider rows, transposed": lambda x: x[..., 4:10].transpose(0, 1),
    "one row, expanded": lambda x: x[:1, :1].expand(4, 3, -1),
    "columns as rows": lambda x: x.transpose(-1, -2),
    "one column of each": lambda x: x[..., 3:4].expand(-1, -1, 2),
}


@pytest.mark.parametrize(("layout", "view"), covering(itertools.product([None, *LAYOUTS], VIEWS)))
def test_inputs_need_not_be_contiguous(device, poisoned, launched, layout, view):
    given = {name: t.reshape(2, 4, -1) for name, t in tensors(layout, shape=(8, 12)).items()}
    before = {name: t.clone() for name, t in given.items()}
    assert_right(*both(VIEWS[view], **options(layout=layout)), given, device)
    assert launched == BOTH
    assert all(torch.equal(t, before[name]) for name, t in given.items())


@pytest.mark.parametrize("layout", ["gate-first", "interleaved"])
def test_gate_and_up_may_be_views_of_one_tensor(device, poisoned, launched, layout):
    def parted(function):
        return lambda gate: function(*reference.split(gate, layout), activation="gelu")

    given = {"gate": tensors(layout)["gate"].expand(2, -1, -1)}
    assert_right(parted(swiglu), parted(reference.swiglu), given, device)
    assert launched == BOTH


@pytest.mark.parametrize("wider", ["gate", "up"])
def test_gate_and_up_may_be_of_rows_of_different_stride(device, poisoned, wider):
    def cut(function):
        return lambda **given: function(**given | {wider: given[wider][..., 2 : 2 + INNER]})

    given = tensors() | {wider: tensors(shape=(3, INNER + 5))[wider]}
    assert_right(cut(swiglu), cut(reference.swiglu), given, device)


def test_rows_of_one_stride_are_read_where_they_are(device):
    gate_up = torch.randn(2, 3, 24, device=device)
    gate, up = gate_up.chunk(2, dim=-1)
    seen = [launches._rows(x) for x in (gate, up, gate_up, gate_up[:, :1, 4:12], gate_up[:1, :1].expand(4, 3, -1))]
    assert [stride for _, stride in seen] == [24, 24, 24, 72, 0]
    assert [x.data_ptr() - gate_up.data_ptr() for x, _ in seen] == [0, 12 * 4, 0, 4 * 4, 0]


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_nothing_is_written_beyond_the_results(device, monkeypatch, layout):
    guards = []

    def guarded(results):
        def make(*arguments):
            found = results(*arguments)
            several = found if isinstance(found, list) else [found]
            memory = [torch.full((t.numel() + 64,), math.pi, dtype=t.dtype, device=device) for t in several]
            guards.extend(whole[t.numel() :] for whole, t in zip(memory, several, strict=True))
            inside = [whole[: t.numel()].view(t.shape) for whole, t in zip(memory, several, strict=True)]
            return inside if isinstance(found, list) else inside[0]

        return make

    for operation in (launches.gated, launches.gated_backward):
        monkeypatch.setattr(operation, "results", guarded(operation.results))
    assert_right(*both(**options(layout=layout)), tensors(layout), device)
    assert len(guards) == (3 if layout is None else 2)
    assert all((guard == math.pi).all() for guard in guards)


@pytest.mark.parametrize("layout", [None, "gate-first", "interleaved"])
def test_rows_may_be_further_apart_than_32_bits_reach(device, layout):
    wide = torch.empty((17 << 27) + 64, dtype=BF16, device=device)  # of which only 17 rows of 26 are touched
    gate = wide.as_strided((17, 26 if layout else INNER), (1 << 27, 1))
    up = None if layout else wide.as_strided((17, INNER), (1 << 27, 1), 32)
    for each in (gate, up):
        if each is not None:
            each.copy_(torch.randn(each.shape))
    how = {} if layout is None else {"layout": layout}
    torch.testing.assert_close(swiglu(gate, up, **how), reference.swiglu(gate, up, **how), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(
    "upstream",
    [lambda y: torch.ones((), device=y.device).expand_as(y), lambda y: torch.randn(y.mT.shape, device=y.device).mT],
)
def test_the_upstream_gradient_need_not_be_contiguous(device, poisoned, upstream):
    given = [t.to(device).requires_grad_() for t in tensors().values()]
    y = swiglu(*given)
    dy = upstream(y.detach())
    assert not dy.is_contiguous()
    expected = torch.autograd.grad(reference.swiglu(*given), given, dy)
    torch.testing.assert_close(torch.autograd.grad(y, given, dy), expected)


class TestWhatIsExtreme:
    KINKED = (
        options("relu"),
        options("relu2"),
        options("silu", "clamp-before"),
        options("sigmoid", "clamp-after"),
        options("silu", "clamp-before-offset"),
        options("silu", "clamp-before", limit=math.inf),
        options("relu", "clamp-after", limit=0.0),
        options("relu", "clamp-before", limit=-1.0),
    )

    @pytest.mark.parametrize("how", KINKED, ids=str)
    def test_at_a_kink_the_gradient_is_that_of_torch(self, device, how):
        values = (-LIMIT, 0.0, -0.0, LIMIT, math.nan, -2.0, 2.0)
        pairs = torch.tensor(list(itertools.product(values, values)), device=device)
        for dy in (1.0, math.inf):
            found, expected = [], []
            for function, into in ((swiglu, found), (reference.swiglu, expected)):
                given = [t.clone().requires_grad_() for t in pairs.T]
                y = function(*given, **how)
                into += [y.detach(), *torch.autograd.grad(y, given, torch.full_like(y, dy))]
            torch.testing.assert_close(found, expected, equal_nan=True)

    @pytest.mark.parametrize("activation", SERVED)
    def test_large_gates_are_exact_and_so_are_their_gradients(self, device, activation):
        # relu2 of 1e30 is infinite in float32; nothing else is.
        sizes = (1e2, 1e4) if activation == "relu2" else (1e2, 1e4, 1e30)
        gate = torch.tensor([sign * size for size in sizes for sign in (1, -1)], device=device)
        up = torch.full_like(gate, 0.5)
        found = [t.requires_grad_() for t in (gate.clone(), up.clone())]
        exact = [t.double().requires_grad_() for t in (gate, up)]
        y, truth = swiglu(*found, activation=activation), reference.swiglu(*exact, activation=activation)
        torch.testing.assert_close(y.double(), truth)
        for ours, theirs in zip(
            torch.autograd.grad(y.sum(), found), torch.autograd.grad(truth.sum(), exact), strict=True
        ):
            torch.testing.assert_close(ours.double(), theirs)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("activation", SERVED)
    def test_what_is_not_finite_comes_out_as_it_does_exactly(self, device, activation, value):
        gate = torch.tensor([value, 1.0, value], device=device)
        up = torch.tensor([1.0, value, value], device=device)
        how = {"activation": activation}
        exact = reference.swiglu(gate.double(), up.double(), **how)
        torch.testing.assert_close(swiglu(gate, up, **how).double(), exact, equal_nan=True)


class TestGradients:
    @pytest.mark.parametrize("variant", ["plain", "clamp-before-offset"])
    @pytest.mark.parametrize("needs", [(True, False), (False, True)])
    def test_only_those_that_are_needed(self, device, monkeypatch, needs, variant):
        program, written = launches.programs.backward, []

        class Recording:
            def __getitem__(self, grid):
                return lambda *given, **constants: written.append(given[:2]) or program[grid](*given, **constants)

        monkeypatch.setattr(launches.programs, "backward", Recording())
        given = [t.to(device).requires_grad_(need) for t, need in zip(tensors().values(), needs, strict=True)]
        wanted = given[needs.index(True)]
        how = options("gelu", variant)
        (found,) = torch.autograd.grad(swiglu(*given, **how).sum(), wanted)
        torch.testing.assert_close(found, torch.autograd.grad(reference.swiglu(*given, **how).sum(), wanted)[0])
        assert [[t is not None for t in each] for each in written] == [list(needs)]

    def test_of_gate_and_up_in_one_is_one_tensor(self, device, monkeypatch):
        made = []
        launch = launches.gated_backward.launch
        monkeypatch.setattr(launches.gated_backward, "launch", lambda *given: made.extend(given[0]) or launch(*given))
        gate_up = tensors("gate-first")["gate"].to(device).requires_grad_()
        (found,) = torch.autograd.grad(swiglu(gate_up).sum(), gate_up)
        assert [t.data_ptr() for t in made] == [found.data_ptr()]
        assert found.shape == gate_up.shape

    @pytest.mark.parametrize("layout", [None, *LAYOUTS])
    def test_nothing_is_kept_but_gate_and_up(self, device, layout):
        kept = []
        given = [t.to(device).requires_grad_() for t in tensors(layout).values()]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            swiglu(*given, **options("gelu_new", "clamp-after", layout))
        assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in given]

    @pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
    def test_none_are_recorded_where_none_are_wanted(self, device, launched, context):
        given = [t.to(device).requires_grad_() for t in tensors().values()]
        with context():
            assert swiglu(*given).grad_fn is None
        assert swiglu(*(t.detach() for t in given)).grad_fn is None
        assert launched == ["forward", "forward"]

    @pytest.mark.parametrize("layout", [None, "gate-second"])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_of_gradients(self, device, launched, variant, layout):
        how = options("gelu_tanh", variant, layout)
        found, expected = [], []
        for function, into in ((swiglu, found), (reference.swiglu, expected)):
            given = [t.to(device).requires_grad_() for t in tensors(layout).values()]
            first = torch.autograd.grad(function(*given, **how).square().sum(), given, create_graph=True)
            into += torch.autograd.grad(sum(each.sin().sum() for each in first), given)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        assert launched == BOTH  # the backward is that of the square's derivative, through y

    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_checkpointing(self, device, launched, use_reentrant):
        given = [t.to(device).requires_grad_() for t in tensors().values()]
        checkpoint(swiglu, *given, use_reentrant=use_reentrant).sum().backward()
        expected = list(torch.autograd.grad(reference.swiglu(*given).sum(), given))
        torch.testing.assert_close([t.grad for t in given], expected)
        assert launched == ["forward", "forward", "backward"]


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_results_repeat_to_the_bit(device, layout):
    how = both(**options(layout=layout))[0]
    once, again = (outcome(how, tensors(layout, BF16, shape=(9, 40)), device).values for _ in range(2))
    assert all(torch.equal(value, again[name]) for name, value in once.items())


class TestWhereTheFormulaRuns:
    @pytest.mark.parametrize(
        "given",
        [tensors(dtype=DOUBLE), tensors(dtype=SINGLE, up=DOUBLE), {"gate": torch.ones(()), "up": torch.ones(())}],
        ids=["float64", "float64 up", "no dimension"],
    )
    def test_what_the_kernels_do_not_take(self, device, launched, given):
        assert_right(*both(**options()), given, device)
        assert launched == []

    def test_a_sparsity_of_zero_cuts_nothing(self, device, launched):
        given = {name: t.to(device) for name, t in tensors().items()}
        how = options(variant="sparse", sparsity=0.0)
        torch.testing.assert_close(swiglu(**given, **how), reference.swiglu(**given))
        assert launched == ["forward"]

    def test_sparsity_keeps_what_the_original_keeps(self, device):
        given = {name: t.to(device) for name, t in tensors(dtype=BF16, shape=(8, 64)).items()}
        how = options("relu", "sparse")
        assert torch.equal(swiglu(**given, **how) == 0, reference.swiglu(**given, **how) == 0)

    def test_integers_are_refused_as_by_the_reference(self, device):
        gate = torch.ones(4, 8, dtype=torch.int64, device=device)
        raised = []
        for function in (swiglu, reference.swiglu):
            with pytest.raises(RuntimeError) as caught:
                function(gate, gate)
            raised.append(str(caught.value))
        assert raised[0] == raised[1]

    @pytest.mark.parametrize(
        ("arguments", "why"),
        [
            ({"variant": "round"}, "unknown variant"),
            ({"activation": "softmax"}, "unknown activation"),
            ({"layout": "gate-third"}, "unknown layout"),
            ({"up": torch.ones(1)}, "up must have the shape of gate"),
            ({"variant": "clamp-before"}, "needs a limit"),
            ({"scale": 2.0}, "takes no scale"),
        ],
    )
    def test_errors_are_those_of_the_reference(self, device, launched, arguments, why):
        with pytest.raises(ValueError, match=why):
            swiglu(torch.ones(2, 8, device=device), **arguments)
        assert launched == []

    @pytest.mark.parametrize("activation", SERVED)
    def test_what_autocast_would_widen(self, device, launched, activation):
        given = {name: t.to(device, BF16) for name, t in tensors().items()}
        with torch.autocast(device, dtype=BF16):
            ours, theirs = (function(**given, activation=activation) for function in (swiglu, reference.swiglu))
        assert ours.dtype is theirs.dtype
        assert launched == ([] if ACTIVATIONS[activation].autocast else ["forward"])

    def test_subclasses_keep_their_own(self, device, launched):
        class Own(torch.Tensor):
            pass

        gate, up = (t.to(device).as_subclass(Own) for t in tensors().values())
        assert type(swiglu(gate, up)) is Own
        assert launched == []

    def test_transforms_see_the_operations_themselves(self, device, launched):
        gate, up = (t.to(device) for t in tensors().values())
        for transform in (
            torch.vmap,
            lambda f: torch.func.grad(lambda *t: f(*t).sum()),
            lambda f: lambda *t: torch.func.jvp(f, t, t),
            lambda f: torch.jit.trace(f, (gate, up), check_trace=False),
        ):
            torch.testing.assert_close(transform(swiglu)(gate, up), transform(reference.swiglu)(gate, up))
        assert launched == []


class TestCompilers:
    @pytest.mark.parametrize(
        "how",
        [options(), options("gelu", "clamp-after", "interleaved"), options("gelu_tanh", "sparse", "gate-second")],
        ids=str,
    )
    def test_one_graph_with_its_gradient_for_every_number_of_tokens(self, device, launched, how):
        torch.compiler.reset()
        ours, theirs = both(**how)
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (2, 5):
            launched.clear()
            assert_right(compiled, theirs, tensors(how.get("layout"), BF16, shape=(rows, INNER)), device)
            assert launched == BOTH

    @pytest.mark.parametrize("layout", [None, *LAYOUTS])
    def test_export(self, device, launched, layout):
        class Module(nn.Module):
            def forward(self, gate, up):
                return swiglu(gate, up, **options(layout=layout))

        given = [t.to(device) for t in tensors(layout, shape=(4, INNER)).values()]
        inputs = (*given, None) if layout else tuple(given)
        rows = {0: torch.export.Dim("rows")}
        exported = torch.export.export(Module(), inputs, dynamic_shapes=(rows, None if layout else rows))
        assert "fuseplug_swiglu.gated.default" in str(exported.graph)
        assert launched == []
        inputs = tuple(None if t is None else t[:3] for t in inputs)
        torch.testing.assert_close(exported.module()(*inputs), reference.swiglu(*inputs, **options(layout=layout)))
        assert launched == ["forward"]

    @pytest.mark.parametrize("layout", [None, *LAYOUTS])
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_fake_tensors_have_the_shapes_and_dtypes_of_the_reference(self, device, launched, variant, layout):
        for dtypes in [(dtype, None) for dtype in DTYPES] + ([] if layout else [(BF16, SINGLE), (SINGLE, HALF)]):
            described = []
            for function in (swiglu, reference.swiglu):
                with FakeTensorMode() as mode:
                    given = [mode.from_tensor(t).requires_grad_() for t in tensors(layout, *dtypes).values()]
                    y = function(*given, **options(variant=variant, layout=layout))
                    found = [y, *torch.autograd.grad(y.sum(), given)]
                described.append([(t.shape, t.dtype) for t in found])
            assert described[0] == described[1]
        assert launched == []

    @pytest.mark.parametrize("layout", [None, *LAYOUTS])
    def test_the_operations_pass_the_checks_of_torch(self, device, layout):
        given = [t.to(device) for t in tensors(layout).values()]
        pair, constants = (given[0], given[1] if len(given) > 1 else None), ("silu", "clamp-after", layout or "")
        torch.library.opcheck(launches.gated.op, (*pair, *constants, 0.5, None, 1.0))
        dy = torch.randn(3, INNER, device=device)
        for wanted in [(True, True), (True, False), (False, True)] if layout is None else [(True, False)]:
            torch.library.opcheck(launches.gated_backward.op, (dy, *pair, *wanted, *constants, 0.5, None, 1.0))


class TestModules:
    @pytest.fixture
    def manager(self):
        return KernelManager(environ={"FUSEPLUG_KERNELS": "triton_fused_swiglu"})

    @thorough  # one takes half a minute in the interpreter; the benchmark's check of itself applies one, too
    @pytest.mark.parametrize(
        ("make", "variant"),
        [
            (lambda: Separate(nn.SiLU()), "silu"),
            (lambda: Separate(ReLU2(), hidden=7, inner=13, bias=True), "relu2"),
            (lambda: InOne(nn.GELU(), "gate-second"), "gelu gate-second"),
            (lambda: InOne(nn.SiLU(), "interleaved"), "silu interleaved"),
            (lambda: Sparse(nn.GELU("tanh"), 0.9), "gelu_tanh sparse"),
            (lambda: Clamped("after", 1.0), "silu clamp-after"),
            (Offset, "swish clamp-before-offset gate-first"),
            (Multiplied, "silu scaled"),
            (Wide, "silu wide"),
        ],
    )
    def test_it_is_what_apply_all_uses(self, device, manager, launched, make, variant):
        model = nn.Sequential(make()).to(device, BF16)
        x = torch.randn(2, 3, next(model.parameters()).shape[-1], device=device, dtype=BF16)
        before = model(x)
        applied = manager.apply_all(model)
        (entry,) = applied.report.fused
        assert (entry.kernel_id, entry.variant, entry.check) == ("triton_fused_swiglu", variant, "passed")
        launched.clear()
        model(x).float().square().mean().backward()
        assert launched == BOTH
        assert all(parameter.grad is not None for parameter in model.parameters())
        applied.undo()
        launched.clear()
        assert torch.equal(model(x), before)
        assert launched == []

    @thorough
    def test_a_model_of_transformers(self, device, manager, launched):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=11, hidden_size=HIDDEN, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2
        )
        model = transformers.LlamaForCausalLM(config).to(device)
        tokens = torch.tensor([[1, 2, 3]], device=device)
        losses = [model(tokens, labels=tokens).loss]
        with manager.apply_all(model) as applied:
            paths = [path for entry in applied.report.fused for path in entry.paths]
            assert paths == ["model.layers.0.mlp", "model.layers.1.mlp"]
            launched.clear()
            losses.append(model(tokens, labels=tokens).loss)
            losses[1].backward()
        assert launched == ["forward", "forward", "backward", "backward"]
        torch.testing.assert_close(losses[1], losses[0])
