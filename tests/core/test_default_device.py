"""Nothing that a kernel makes lands on the default device, which is the caller's."""

import ast
from pathlib import Path

import pytest
import torch
from support.ambient import default_device

from fuseplug_moe import reference as mixture_reference
from fuseplug_moe.backends import inductor as mixtures
from fuseplug_rmsnorm.backends import inductor as norms
from fuseplug_rope.backends import inductor as rotations
from fuseplug_swiglu.backends import inductor as gates

ROOT = Path(__file__).parents[2]
FACTORIES = {
    *("tensor", "as_tensor", "arange", "linspace", "logspace", "zeros", "ones", "empty", "full", "eye"),
    *("rand", "randn", "randint", "randperm", "scalar_tensor"),
}
# Modules of the conformance kit are made where their caller wants them; other tensors are of the check before a plan.
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


@pytest.fixture
def _meta():
    with default_device("meta"):
        yield


def made(*shape):
    return torch.randn(*shape, device="cpu", generator=torch.Generator("cpu").manual_seed(sum(shape)))


@pytest.mark.parametrize("tokens", [1, 3, 40, 400])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_mixtures_are_right_whatever_the_default_device(tokens, dtype, biased, train):
    index = torch.randint(0, 4, (tokens, 2))
    x, weights, gate_up, down = (
        t.to(dtype) for t in (made(tokens, 16), made(tokens, 2), made(4, 32, 16), made(4, 16, 16))
    )
    biases = {"gate_up_bias": made(4, 32).to(dtype), "down_bias": made(4, 16).to(dtype)} if biased else {}
    x.requires_grad_(train)
    want = mixture_reference.moe(x, index, weights, gate_up, down, **biases)
    with default_device("meta"):
        found = mixtures.moe(x, index, weights, gate_up, down, **biases)
        if train:
            found.sum().backward()
    torch.testing.assert_close(found, want, rtol=5e-2, atol=5e-1 if dtype is torch.bfloat16 else 1e-3)


@pytest.mark.usefixtures("_meta")
def test_the_other_ops_too():
    assert norms.rms_norm(made(4, 16), made(16)).device.type == "cpu"
    assert norms.rms_norm(made(512, 256).bfloat16(), made(256).bfloat16()).device.type == "cpu"
    assert gates.swiglu(made(4, 16), made(4, 16)).device.type == "cpu"
    assert gates.swiglu(made(2048, 256), made(2048, 256), activation="relu2").device.type == "cpu"
    q, k = rotations.rope(made(1, 2, 3, 8), made(1, 2, 3, 8), made(3, 8), made(3, 8))
    assert (q.device.type, k.device.type) == ("cpu", "cpu")


def test_a_mixture_under_vmap():
    index = torch.tensor([[[0, 1], [2, 0], [1, 3]], [[3, 3], [1, 0], [2, 1]]])
    x, weights, gate_up, down = made(2, 3, 16), made(2, 3, 2), made(4, 32, 16), made(4, 16, 16)
    want = torch.stack([mixture_reference.moe(x[i], index[i], weights[i], gate_up, down) for i in range(2)])
    for projections in ((gate_up, down), (list(gate_up), list(down))):
        found = torch.vmap(lambda x, i, w, p=projections: mixtures.moe(x, i, w, *p))(x, index, weights)
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
