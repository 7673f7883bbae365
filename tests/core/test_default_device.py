"""No tensor that a kernel makes lands on the default device, which belongs to the caller."""

import ast
from pathlib import Path

import pytest
import torch

from fuseplug_moe import reference as mixture_reference
from fuseplug_moe.backends import inductor as mixtures

ROOT = Path(__file__).parents[2]
FACTORIES = {
    *("tensor", "as_tensor", "arange", "linspace", "logspace", "zeros", "ones", "empty", "full", "eye"),
    *("rand", "randn", "randint", "randperm", "scalar_tensor"),
}
# Specimens are modules of the conformance kit, made where their caller wants them. Their other tensors belong to the
# check before a plan.
ELSEWHERE = {"specimens.py", "specimens"}
SOURCES = [path for path in sorted(ROOT.glob("kernel-packages/*/src/**/*.py")) if not ELSEWHERE & {*path.parts}]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_tensor_that_is_made_says_where(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    silent = [
        f"{path.name}:{call.lineno}: {ast.unparse(call)}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in FACTORIES
        and ast.unparse(call.func.value) == "torch"
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert not silent


def made(*shape):
    return torch.randn(*shape, device="cpu", generator=torch.Generator("cpu").manual_seed(sum(shape)))


def test_a_mixture_under_vmap():
    index = torch.tensor([[[0, 1], [2, 0], [1, 3]], [[3, 3], [1, 0], [2, 1]]])
    x, weights, gate_up, down = made(2, 3, 16), made(2, 3, 2), made(4, 32, 16), made(4, 16, 16)
    want = torch.stack([mixture_reference.moe(x[i], index[i], weights[i], gate_up, down) for i in range(2)])
    for projections in ((gate_up, down), (list(gate_up), list(down))):
        found = torch.vmap(lambda x, i, w, p=projections: mixtures.moe(x, i, w, *p))(x, index, weights)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
