"""Inductor's programs for RoPE are right, copy nothing, and are compiled only a handful of times."""

import functools
import itertools
import threading

import pytest
import torch
from support import rotations
from support.recorded import uncompiled
from support.rotations import LAYOUTS, SIZES, as_attention, on, seen, tensors
from support.thorough import covering, few_on, first_quick, quick_if
from torch import nn

from fuseplug_backends.inductor import program
from fuseplug_rope.backends import inductor
from fuseplug_rope.kernels import InductorRoPEKernel
from fuseplug_rope.reference import VARIANTS
from fuseplug_rope.reference import rope as reference

pytestmark = pytest.mark.skipif(
    InductorRoPEKernel().unavailable("cpu") is not None, reason="Inductor needs a C++ compiler"
)

# One for each way of writing the formula.
WAYS = ["half", "half-partial", "interleaved", "mla"]

check = functools.partial(rotations.assert_right, inductor.rope, "cpu")


@pytest.fixture
def ran(everything_compiled, backend):
    """The programs that are started, including those for small inputs."""
    return backend.order


@pytest.fixture
def traced(ran, monkeypatch):
    """Like `ran`, but records programs without compiling them to machine code, for tests of layouts and counts."""
    monkeypatch.setattr(inductor._fused, "_programs", {})
    monkeypatch.setattr(program, "compiled_by_inductor", uncompiled)
    return ran


@pytest.mark.parametrize("variant", few_on("inductor", WAYS))
def test_values_and_gradients_are_right_compiled(ran, variant):
    check(tensors(variant, torch.bfloat16), variant=variant)
    assert len(ran) == 2


@pytest.mark.parametrize(("x", "table"), first_quick([(torch.float32, None), (torch.bfloat16, torch.float32)]))
def test_float32_and_tables_of_another_dtype_that_want_gradients(ran, x, table):
    check([t.requires_grad_() for t in tensors(x=x, table=table)])
    assert len(ran) == 2


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in WAYS])
def test_the_formula_is_that_of_every_other_variant(variant):
    q, _, cos, sin = as_attention(*tensors(variant))
    rotated = cos.shape[-1] * (2 if VARIANTS[variant].table == "half" else 1)
    y = inductor.rope_formula(q, cos, sin, variant, rotated, q.dtype)
    torch.testing.assert_close(y, reference(q, None, cos, sin, variant=variant)[0])


QUICK = {"elements apart", "sequence first", "repeated", "tables of two dimensions"}
IN_PIECES = {"elements apart", "tokens within elements"}
"""Layouts in which a row of x is not one piece of memory. The program's results have rows in one piece."""


@pytest.mark.parametrize("layout", quick_if([name for name in LAYOUTS if name != "a vector"], QUICK))
def test_programs_are_run_in_any_layout_of_rows(traced, layout):
    of_x, of_table, sizes = LAYOUTS[layout]
    check(tensors(**sizes), seen(of_x, of_table))
    assert len(traced) == (0 if layout in IN_PIECES else 2)


@pytest.mark.parametrize("sizes", few_on("inductor", SIZES[1:]), ids=str)
def test_programs_are_run_at_any_size(traced, sizes):
    check(tensors(**sizes))
    assert len(traced) == 2


@pytest.mark.parametrize(
    ("variant", "lay"),
    covering(
        itertools.product(VARIANTS, ["packed", "sequence first", "as it is"]),
        by=lambda variant, lay: [variant if variant in WAYS else "another", lay],
    ),
)
def test_the_result_of_a_program_lies_in_memory_as_the_references(traced, variant, lay):
    def lie(x):
        ways = {"packed": x.contiguous(), "sequence first": x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)}
        return ways.get(lay, x)

    q, k, cos, sin = as_attention(*tensors(variant))
    q, k = lie(q), lie(k)
    expected = [y.stride() for y in reference(q, k, cos, sin, variant=variant)]
    assert [y.stride() for y in inductor.rope(q, k, cos, sin, variant=variant)] == expected
    with torch.no_grad():
        assert [y.stride() for y in inductor.rope(q, k, cos, sin, variant=variant)] == expected
    assert (expected == [q.stride(), k.stride()]) == (VARIANTS[variant].keeps_order or lay == "packed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_few_tokens_take_a_lean_way_that_is_right(dtype):
    with torch.no_grad():
        check([t.detach() for t in tensors(x=dtype, length=1)], share_of_theirs=1.01)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_module_that_uses_it_exports_and_traces(ran):
    class Rotates(nn.Module):
        def forward(self, q, k, cos, sin):
            return inductor.rope(q, k, cos, sin)

    arguments = tuple(t.detach() for t in as_attention(*tensors()))
    exported = torch.export.export(Rotates(), arguments).module()
    for function in (exported, torch.jit.trace(Rotates(), arguments, check_trace=False)):
        torch.testing.assert_close(function(*arguments), reference(*arguments))
    assert not ran


def test_threads_may_all_be_first(traced):
    arguments = as_attention(*on("cpu", tensors(length=17)))
    results = []
    threads = [threading.Thread(target=lambda: results.append(inductor.rope(*arguments))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        torch.testing.assert_close(result, reference(*arguments))


def test_one_forward_and_one_backward_are_compiled_for_all_sizes(traced):
    # Equal sizes first: sizes that are equal by chance must not be taken to be equal in every call.
    for batch, length, heads in [(4, 4, (4, 4)), (2, 5, (3, 2)), (7, 64, (8, 2)), (3, 300, (2, 5))]:
        q, k, cos, sin = as_attention(*tensors(batch=batch, length=length, heads=heads))
        for _ in range(2):
            torch.autograd.grad(sum(y.square().sum() for y in inductor.rope(q, k, cos, sin)), (q, k))
    assert [program.compilations for program in inductor._fused._programs.values()] == [1, 1]


def test_a_batch_that_shares_no_dimension_is_one_program_with_a_batch_of_one(traced):
    for batch, length in ((1, 6), (3, 4)):
        inductor.rope(*as_attention(*tensors(batch=batch, length=length, tables=batch)))
    assert len(inductor._fused._programs) == 1


def test_tables_that_enlarge_the_result_are_left_to_the_reference(ran):
    check(tensors(batch=1, tables=3))
    assert not ran
