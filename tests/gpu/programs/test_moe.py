"""The Triton mixture of experts, compiled for a GPU that is not here: nothing spills, and everything fits."""

import itertools

import pytest
import torch
from support.thorough import first_quick, thorough

from fuseplug_moe.backends.triton import moe, tiles
from fuseplug_testing.triton import compile_only

GPT_OSS = {
    "transposed": True,
    "layout": "interleaved",
    "activation": "swish-clamp-before-offset",
    "limit": 7.0,
    "biased": True,
}
MODELS = {
    "qwen3 30b-a3b": (128, 8, 2048, 768, {}),
    "mixtral 8x7b": (8, 2, 4096, 14336, {}),
    "gpt-oss 20b": (32, 4, 2880, 2880, GPT_OSS),
    "aria": (64, 6, 2560, 1664, {"transposed": True}),
    "nemotron-h": (128, 6, 2688, 1856, {"layout": "ungated", "activation": "relu2"}),
}
"""The number of experts, the choices of each token, the hidden and inner size, and options."""

HEIGHTS = [64, 16, 32, 128]
"""The heights of tiles, in rows."""


def step(tokens, experts, k, hidden, inner, *, dtype=torch.bfloat16, biased=False, listed=False, **options):
    """Compile forward and backward. The tensors are never filled, because nothing is computed."""

    def empty(*shape):
        return torch.empty(shape, dtype=dtype, requires_grad=True)

    def matrices(rows, columns):
        shape = (columns, rows) if options.get("transposed") else (rows, columns)
        return [empty(*shape) for _ in range(experts)] if listed else empty(experts, *shape)

    columns = inner if listed or options.get("layout") == "ungated" else 2 * inner
    options |= {"up": matrices(inner, hidden)} if listed else {}
    options |= {"gate_up_bias": empty(experts, columns), "down_bias": empty(experts, hidden)} if biased else {}
    x, index = empty(tokens, hidden), torch.empty(tokens, k, dtype=torch.int64)
    y = moe(x, index, empty(tokens, k), matrices(columns, hidden), matrices(hidden, inner), **options)
    y.backward(torch.empty_like(y))


@pytest.mark.parametrize(("model", "tokens"), first_quick(itertools.product(MODELS, [8192, 1])))
def test_nothing_spills_at_the_sizes_of_models(model, tokens):
    *sizes, options = MODELS[model]
    with compile_only(90) as programs:
        step(tokens, *sizes, **options)
    assert {program.name: program.spills for program in programs if program.spills} == {}


@pytest.mark.parametrize(
    ("options", "rows"),
    first_quick(itertools.product([{"listed": True}, {"dtype": torch.float32}, {"activation": "gelu"}], HEIGHTS)),
    ids=str,
)
def test_nothing_spills_at_any_height(options, rows):
    with compile_only(90) as programs:
        step(rows, 1, 1, 512, 512, **options)
    assert {program.name: program.spills for program in programs if program.spills} == {}


@pytest.mark.parametrize("rows", first_quick(HEIGHTS))
def test_they_fit_a_gpu_with_less_memory(rows, monkeypatch):
    monkeypatch.setattr(tiles, "shared_memory", lambda device: 99 << 10)
    for table in (tiles.product, tiles.gradient):
        monkeypatch.setattr(tiles, table.__name__, table.__wrapped__)
    with compile_only(89) as programs:
        step(rows, 1, 1, 512, 512)
    assert max(program.shared for program in programs) <= 99 << 10


@thorough
def test_other_numbers_of_tokens_compile_nothing_new():
    sizes = 8, 2, 512, 256
    with compile_only(90) as programs:
        for tokens in (1, 64, 128, 256, 512, 4096):
            step(tokens, *sizes)
        before = len(programs)
        for tokens in (2, 3, 47, 61, 100, 129, 250, 301, 511, 777, 1500, 2049, 5000):
            step(tokens, *sizes)
    assert [program.name for program in programs[before:]] == []


def test_one_token_fills_the_gpu():
    """Each of eight experts has enough programs for 132 multiprocessors to share its columns."""
    shape = tiles.product(tiles.height(8, 128), 2 * 768, 2048, 2, torch.device("cpu"))
    assert 8 * 2 * 768 // shape.width >= 132
