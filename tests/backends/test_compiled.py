"""A program is right whatever surrounds the call, and is compiled again only where it must be."""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch._inductor import cpu_vec_isa

from fuseplug_backends.inductor import Compiled, InductorKernel, Program
from fuseplug_backends.inductor.compiled import plain
from fuseplug_backends.tracing import transparent

pytestmark = [
    pytest.mark.usefixtures("everything_compiled"),
    pytest.mark.skipif(
        InductorKernel.unavailable(InductorKernel, "cpu") is not None, reason="Inductor needs a C++ compiler"
    ),
]


def normed(x, table):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * table


def scaled(x, table):
    return (x * table,)


def some(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def test_a_tensor_whose_memory_holds_its_negative_is_not_plain():
    negative = torch.view_as_complex(some(4, 8, 2)).conj().imag
    assert negative.is_neg()
    assert plain(some(4, 8))
    assert not plain(some(4, 8), negative)
    assert not transparent(some(4, 8), negative)


def test_one_compilation_serves_all_sizes_but_none_and_one():
    program = Program(scaled, [(0,), ()])
    table = some(8)
    for rows, compilations in ((4, 1), (2, 1), (700, 1), (1, 2), (1, 2), (0, 3), (5, 3)):
        x = some(rows, 8)
        torch.testing.assert_close(program(x, table), scaled(x, table), check_device=False)
        assert program.compilations == compilations


def test_sizes_that_are_equal_by_chance_may_differ_later():
    program = Program(lambda x, y: (x * 2, y + 1), [(0,), (0,)])
    for sizes in ((4, 4), (4, 7)):
        x, y = (some(size, 3) for size in sizes)
        torch.testing.assert_close(tuple(program(x, y)), (x * 2, y + 1))
    assert program.compilations == 1


def test_a_branch_by_size_is_taken_by_the_size_of_each_call():
    program = Program(lambda x: (x * 2,) if x.shape[0] > 10 else (x * 3,), [(0,)])
    for rows in (4, 20, 5, 30):
        x = some(rows, 3)
        torch.testing.assert_close(program(x)[0], x * (2 if rows > 10 else 3))
    assert program.compilations == 2


def test_what_inductor_keeps_for_some_sizes_it_gives_to_no_others():
    def summed_in_blocks(x):
        blocks = (x.shape[0] + 31) // 32  # a recording with one block takes this for the constant 1
        padded = nn.functional.pad(x, (0, 0, 0, blocks * 32 - x.shape[0]))
        return (padded.view(blocks, 32, x.shape[1]).sum((0, 1)),)

    program = Program(summed_in_blocks, [(0,)])
    for rows in (20, 100, 64, 33):
        x = some(rows, 16)
        torch.testing.assert_close(program(x)[0], x.sum(0))


@pytest.mark.parametrize("rows", [[300, 5000, 400], [5000, 300, 6000]])
def test_what_inductor_assumes_of_a_size_is_asked_at_each_call(rows):
    """Inductor sums more than 4096 rows in another way than fewer rows."""
    formula = Compiled(normed)
    for each in rows:
        x, table = some(each, 16).requires_grad_(), some(16).requires_grad_()
        grad = torch.ones(each, 16)
        found = torch.autograd.grad(formula((), x, table), (x, table), grad)
        torch.testing.assert_close(found, torch.autograd.grad(normed(x, table), (x, table), grad), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(6, 8), (3, 4, 8), (2, 3, 4, 8)])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_result_is_in_rows_and_no_view_whatever_the_formula_gives(shape, gradients):
    formula = Compiled(lambda x: (x.t() * 2).contiguous().t())
    x = some(*shape).requires_grad_(gradients)
    y = formula((), x)
    torch.testing.assert_close(y, x * 2)
    assert (y.is_contiguous(), y._is_view(), y.requires_grad) == (True, False, gradients)
    y.mul_(2)  # autograd refuses this for a view of the output of a function
    if gradients:
        y.sum().backward()
        torch.testing.assert_close(x.grad, torch.full(shape, 4.0))


def test_rows_lie_apart_as_they_may_whichever_came_first():
    """The stride of rows that are repeated or overlap would be compiled in."""
    formula, table = Compiled(normed), some(8)
    for x in (some(1, 8).expand(4, 8), some(5, 20)[:, :8], some(40).unfold(0, 8, 1), some(2, 3, 16)[..., :8]):
        torch.testing.assert_close(formula((), x, table), normed(x, table))


def test_a_formula_that_makes_a_number_of_the_rows_is_refused():
    formula = Compiled(lambda x: x.view(len(x), 2, -1).flatten(1))
    with pytest.raises(TypeError, match="varies, but was taken for the number 4"):
        formula((), some(4, 6))


def refused(*_):
    raise AssertionError("called while a program was compiled")


SURROUNDINGS = {
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(refused, refused),
    "another default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
}


@pytest.mark.parametrize("around", SURROUNDINGS.values(), ids=SURROUNDINGS)
def test_a_program_is_compiled_and_run_the_same_wherever_it_is_called_first(around):
    x, table = some(6, 8), some(8)
    weight = nn.Parameter(some(8, 8))

    def function(x, table):
        # Autocast would round the product, and hooks would see the vjp.
        _, pull = torch.func.vjp(lambda x: torch.sigmoid(x) * table, x)
        return x @ x.t(), *pull(x)

    expected = function(x, table)
    program = Program(function, [(0,), ()])
    with around():
        first = program(x, table)
    (weight * 1).sum().backward()
    for found in (first, program(x, table)):
        torch.testing.assert_close(tuple(found), expected)
    assert program.compilations == 1


def test_a_tensor_on_another_device_is_an_error_and_not_read():
    compiled = Compiled(lambda x, table: x * table)
    compiled((), some(4, 8), some(8))
    with pytest.raises(RuntimeError, match="device"):
        compiled((), some(4, 8), some(8).to("meta"))


def test_it_is_recorded_where_hooks_on_saved_tensors_are_forbidden():
    x = some(4, 8).requires_grad_()
    with torch.autograd.graph.disable_saved_tensors_hooks("forbidden"):
        Compiled(lambda x: x.sigmoid())((), x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().sigmoid() * (1 - x.detach().sigmoid()))


def test_what_a_program_writes_to_is_written_to():
    def function(z, x):
        z.copy_(z * x)
        return ()

    program = Program(function, [(0,), (0,)])
    for rows in (3, 5):
        z, x = some(rows, 4), some(rows, 4)
        expected = z * x
        assert len(program(z[:], x)) == 0
        torch.testing.assert_close(z, expected)


def test_a_part_of_a_tensor_is_read_where_it_lies():
    program = Program(scaled, [(0,), ()])
    x, table = some(9, 8), some(3, 8)
    for rows in (slice(0, 4), slice(3, 9)):
        torch.testing.assert_close(program(x[rows], table[1])[0], x[rows] * table[1])
    assert program.compilations == 1


def test_threads_share_one_compilation():
    program = Program(scaled, [(0,), ()])
    x, table, found = some(6, 8), some(8), []
    threads = [threading.Thread(target=lambda: found.append(program(x, table)[0])) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert program.compilations == 1
    torch.testing.assert_close(found, 4 * [x * table])


def test_another_number_of_threads_is_compiled_for():
    program = Program(scaled, [(0,), ()])
    x, table, before = some(6, 8), some(8), torch.get_num_threads()
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            torch.testing.assert_close(program(x, table)[0], x * table)
    finally:
        torch.set_num_threads(before)
    assert program.compilations == 2


PROBES = """
import torch
from torch._inductor import cpu_vec_isa
X, built = torch.ones(64, 64), []
check = cpu_vec_isa.VecISA.check_build
cpu_vec_isa.VecISA.check_build = lambda self, code: built.append(code) or check(self, code)
{call}
print(built.count(cpu_vec_isa.VecISA._avx_code), *map(str, cpu_vec_isa.valid_vec_isa_list()), sep="|")
"""
BY_INDUCTOR = "found = torch.compile(lambda x: x * 2)(X)"
BY_FUSEPLUG = "from fuseplug_backends.inductor import Program; (found,) = Program(lambda x: (x * 2,), [(0,)])(X)"
NOT_THE_WIDEST = """
flags = cpu_vec_isa.x86_isa_checker()
widest = next(isa for isa in cpu_vec_isa.supported_vec_isa_list if {*str(isa).split()} <= {*flags})
type(widest).build_macro = lambda self: [*self._macro, "Vectorized=1"]  # torch's headers do not compile
"""
ASKED_BY = {
    "Inductor": BY_INDUCTOR,
    "fuseplug": BY_FUSEPLUG,
    "Inductor-narrower": NOT_THE_WIDEST + BY_INDUCTOR,
    "fuseplug-narrower": NOT_THE_WIDEST + BY_FUSEPLUG + "\nassert torch.equal(found, X * 2)",
}


def vectors(asked, folder):
    """How often *asked* checked the vector instructions of this CPU, and those that it found."""
    done = subprocess.run(
        [sys.executable, "-c", PROBES.format(call=ASKED_BY[asked])],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / asked)},
    )
    count, *found = done.stdout.strip().split("|")
    return int(count), found


@pytest.mark.thorough
def test_a_program_stands_for_the_check_of_vector_instructions(tmp_path):
    (_, checked), (count, unchecked) = (vectors(asked, tmp_path) for asked in ("Inductor", "fuseplug"))
    assert (count, unchecked) == (0, checked)


@pytest.mark.thorough
@pytest.mark.skipif(not cpu_vec_isa.x86_isa_checker(), reason="there is one set of instructions at most")
def test_vector_instructions_that_do_not_work_are_found_out(tmp_path):
    (_, checked), (count, found) = (vectors(asked, tmp_path) for asked in ("Inductor-narrower", "fuseplug-narrower"))
    assert found == checked
    assert count > 0
