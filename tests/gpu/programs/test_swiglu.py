"""Triton's programs for gated MLPs on an H100: no spills, memory moved by 16 bytes, few programs."""

import itertools
import re

import pytest
import torch
from support.thorough import covering

from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_backends.triton import FORMULAS
from fuseplug_swiglu.backends.triton import launches, swiglu
from fuseplug_swiglu.reference import LAYOUTS, VARIANTS
from fuseplug_testing.triton import compile_only

BF16, SINGLE = torch.bfloat16, torch.float32
WIDTHS = (3072, 11008, 14336)
NUMBERS = {"limit": 7.0, "scale": 0.5, "sparsity": 0.0}


def train(layout=None, dtypes=(BF16, BF16), shape=(2, 14336), activation="silu", variant="plain", **numbers):
    """Start the kernels of a forward and a backward."""
    width = shape[-1] * (1 if layout is None else 2)
    given = [torch.randn(*shape[:-1], width, dtype=dtype, requires_grad=True) for dtype in dtypes]
    how = {name: NUMBERS[name] for name in VARIANTS[variant].needs} | ({} if layout is None else {"layout": layout})
    y = swiglu(*given[: 2 if layout is None else 1], activation=activation, variant=variant, **how | numbers)
    y.backward(torch.randn_like(y))


def assert_lean(programs, registers):
    assert [program.name for program in programs] == ["forward", "backward"]
    assert [program.spills for program in programs] == [0, 0]
    assert max(program.registers for program in programs) <= registers


@pytest.fixture
def compiled(monkeypatch):
    """What Triton compiled for each launch, by name."""
    found = {}

    class Recording:
        def __init__(self, name):
            self.name, self.program = name, getattr(launches.programs, name).fn

        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                found[self.name] = self.program[grid](*arguments, **constants)

            return launch

    for name in ("forward", "backward"):
        monkeypatch.setattr(launches.programs, name, Recording(name))
    return found


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (SINGLE, SINGLE)], ids=str)
@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_nothing_is_spilled_and_memory_is_moved_by_16_bytes(compiled, layout, dtypes):
    with compile_only(90) as programs:
        train(layout, dtypes)
    assert_lean(programs, registers=48)
    for program in compiled.values():
        moves = re.findall(r"(?:ld|st)\.global\S*", program.asm["ptx"])
        assert moves
        assert {move.rpartition("global")[2] for move in moves} == {".v4.b32"}


@pytest.mark.parametrize("activation", [name for name, row in ACTIVATIONS.items() if row.formula in FORMULAS])
def test_no_activation_spills(activation):
    with compile_only(90) as programs:
        train(activation=activation)
        first = len(programs)
        train(activation=activation, variant="clamp-before-offset", dtypes=(SINGLE, SINGLE))
    assert_lean(programs[:first], registers=56)
    assert_lean(programs[first:], registers=64)


@pytest.mark.parametrize(("layout", "variant"), covering(itertools.product([None, "interleaved"], VARIANTS)))
def test_no_variant_spills(layout, variant):
    with compile_only(90) as programs:
        train(layout, variant=variant)
    assert_lean(programs, registers=56)


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_one_program_serves_all_tokens_and_widths_and_numbers(layout):
    with compile_only(90) as programs:
        for width in WIDTHS:
            for tokens in (1, 2, 7, 16, 33):
                for limit in (7, 7.5, 1):
                    train(layout, shape=(tokens, width), variant="clamp-before", limit=limit)
    assert_lean(programs, registers=56)


@pytest.mark.parametrize(("layout", "width"), covering(itertools.product([None, *LAYOUTS], [2730, 1001])))
def test_neither_do_tokens_make_another_program_of_an_odd_width(layout, width):
    with compile_only(90) as programs:
        for tokens in (1, 2, 7, 16, 32):
            train(layout, shape=(tokens, width))
    assert_lean(programs, registers=64)


def test_activations_that_are_one_function_are_one_program():
    with compile_only(90) as programs:
        for activation in ("silu", "quick_gelu", "swish"):
            train(activation=activation, beta=1.5)
    assert_lean(programs, registers=48)
