"""The programs that a plan needs are built side by side, which changes nothing that the plan finds."""

import sys
import threading
from concurrent.futures import wait

import pytest
import torch
from support.kernels import NormKernel, norm_reference, ran, variant_of
from support.managers import manager_of
from support.models import Norm, tiny_llama
from support.promises import Promised

from fuseplug_backends.inductor import Compiled, InductorKernel, Program
from fuseplug_backends.inductor import rehearsal as rehearsals
from fuseplug_backends.inductor.rehearsal import building, rehearsal

pytestmark = [
    pytest.mark.usefixtures("everything_compiled"),
    pytest.mark.skipif(
        InductorKernel.unavailable(InductorKernel, "cpu") is not None, reason="Inductor needs a C++ compiler"
    ),
]
_norm = Compiled(norm_reference)


def compiled_norm(x, weight, eps, offset=None, cast_last=False):
    ran["compiled"] += 1
    return _norm((eps, offset, cast_last), x, weight)


def wrong_norm(x, weight, eps, offset=None, cast_last=False):
    return 2 * compiled_norm(x, weight, eps, offset, cast_last)


class InductorNorm(InductorKernel, NormKernel):
    kernel_id = "inductor_norm"
    function = f"{__name__}:compiled_norm"
    mixes = ((torch.float32, torch.float32),)


def tripled(x):
    return (x * 3 + 1,)


def some(rows):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def test_in_a_rehearsal_nobody_waits_and_results_are_right():
    program, builders = Program(tripled, [(0,)]), Promised()
    with rehearsal(builders):
        for rows in (4, 9):
            torch.testing.assert_close(program(some(rows))[0], tripled(some(rows))[0], rtol=0, atol=0)
    assert len(builders.promised) == program.compilations == 1

    done = threading.Event()
    waiting = threading.Thread(target=lambda: program(some(5)) and done.set(), daemon=True)
    waiting.start()
    assert not done.wait(0.3), "what is not built was not waited for"
    builders.keep()
    assert done.wait(60)
    torch.testing.assert_close(program(some(6))[0], tripled(some(6))[0])
    assert program.compilations == 1


THREADS = """
import os, time
import torch
from fuseplug_backends.inductor import spinning
from fuseplug_backends.inductor.rehearsal import building

spinning.LONG = 0.2

def threads():
    return len(os.listdir("/proc/self/task"))

def when(enough):
    deadline = time.monotonic() + 60
    while not enough() and time.monotonic() < deadline:
        time.sleep(0.01)
    return threads() - before

before = threads()
with building(1) as builders:
    builders.begin(lambda: None).result()
    print(when(lambda: threads() == before + 1))
    for _ in range(2):
        builders.begin(lambda: time.sleep(0.4)).result()
        print(when(lambda: threads() >= before + 3))
print(when(lambda: threads() <= before))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it counts the threads that Linux lists")
def test_while_compilers_run_openmp_has_a_thread_too_many_and_none_after(fresh_python):
    said = fresh_python(THREADS, OMP_NUM_THREADS="2")
    builder, who_starts_it, of_openmp = 1, 1, 1
    enough = builder + who_starts_it + of_openmp
    assert said.stdout.split() == [str(builder), str(enough), str(enough), "0"], said.stderr


@pytest.mark.parametrize("fails", [False, True])
def test_programs_are_built_once_the_header_is_there_or_failed(monkeypatch, fails):
    compiled = threading.Event()

    def header():
        compiled.wait(60)
        if fails:
            raise OSError("planted")

    monkeypatch.setattr("fuseplug_backends.inductor.rehearsal.compile_header", header)
    with building(2) as builders:
        builders.prepare()
        built = builders.begin(lambda: "built")
        assert not wait([built], 0.3).done, "the header was not waited for"
        compiled.set()
        assert built.result(60) == "built"


def test_what_was_given_up_is_built_when_it_is_called():
    program = Program(lambda x: (x * 5 - 2,), [(0,)])
    with building(1) as builders:
        stop = threading.Event()
        builders.begin(stop.wait)
        with rehearsal(builders):
            program(some(4))
    stop.set()
    torch.testing.assert_close(program(some(4))[0], some(4) * 5 - 2)
    assert program.compilations == 1


def test_what_cannot_be_built_raises_when_it_is_called(monkeypatch):
    def broken(*_, **__):
        raise OSError("planted")

    trusted, doubted = threading.Event(), threading.Event()
    trusted.set()
    monkeypatch.setattr("fuseplug_backends.inductor.vectors._trusted", trusted)
    monkeypatch.setattr("fuseplug_backends.inductor.vectors._doubted", doubted)
    monkeypatch.setattr("torch._inductor.codecache.CppPythonBindingsCodeCache.load_pybinding_async", broken)
    program = Program(lambda x: (x * 7 - 3,), [(0,)])
    with building(1) as builders, rehearsal(builders):
        program(some(4))
    with pytest.raises(Exception, match="planted"):
        program(some(4))
    assert doubted.is_set()


def test_what_failed_for_once_is_built_again():
    program, builders = Program(lambda x: (x * 11 - 4,), [(0,)]), Promised()
    with rehearsal(builders):
        program(some(4))
    builders.fail()
    torch.testing.assert_close(program(some(4))[0], some(4) * 11 - 4)
    assert program.compilations == 1


def test_what_is_recorded_wrongly_raises_in_a_rehearsal_too():
    program = Program(lambda x: (x.view(len(x), 4, 2),), [(0,)])
    with rehearsal(Promised()), pytest.raises(TypeError, match="was taken for the number 4"):
        program(some(4))


@pytest.fixture
def side_by_side(monkeypatch):
    """Set how many compilers run side by side, and return a list of the numbers that were asked for."""
    asked = []

    def let(threads):
        def counted(number):
            asked.append(number)
            return building(number)

        monkeypatch.setattr(rehearsals, "inductor_threads", lambda: threads)
        monkeypatch.setattr(rehearsals, "building", counted)
        return asked

    return let


def described(report):
    return [
        (entry.paths, str(entry.target), entry.kernel_id, entry.check, entry.rejections) for entry in report.entries
    ]


def test_a_plan_is_the_same_with_and_without(side_by_side):
    manager = manager_of(InductorNorm, NormKernel)
    asked = side_by_side(1)
    one_by_one = manager.plan(tiny_llama()).report
    assert asked == []
    side_by_side(2)
    both = manager.plan(tiny_llama(), verify="always").report
    assert asked == [2]
    assert described(both) == described(one_by_one)
    assert {entry.kernel_id for entry in both.fused} == {"inductor_norm"}
    for each in threading.enumerate():
        if each.name.startswith("fuseplug-build"):
            each.join(60)  # the plan told it to end
            assert not each.is_alive()


def test_a_kernel_that_is_wrong_is_found_out_and_the_next_one_comes(side_by_side):
    side_by_side(2)
    wrong = variant_of(InductorNorm, function=f"{__name__}:wrong_norm")
    (entry,) = manager_of(wrong, NormKernel).plan(Norm()).report.entries
    assert (entry.kernel_id, entry.check) == ("toy_norm", "passed")
    ((kernel_id, why),) = entry.rejections
    assert kernel_id == wrong.kernel_id
    assert "its numbers are wrong" in why.reason


def test_kernels_that_do_not_compile_are_called_no_more_often(side_by_side):
    calls = []
    for threads in (1, 2):
        side_by_side(threads)
        ran.clear()
        manager_of(InductorNorm, variant_of(NormKernel, priority=1)).plan(Norm(), verify="always")
        calls.append(ran["norm"])
    assert calls[0] == calls[1] > 0
