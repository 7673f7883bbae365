"""The packages' functions choose by device which of their kernels computes."""

import importlib

import pytest
import torch

from fuseplug_backends import functional

PACKAGES = ("rmsnorm", "swiglu", "rope", "moe", "linear_cross_entropy")


@pytest.fixture(autouse=True)
def forget():
    functional._choose.cache_clear()
    yield
    functional._choose.cache_clear()


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(
    ("device_type", "lacking", "module"),
    [
        ("cuda", (), "triton"),
        ("xpu", (), "triton"),
        ("npu", (), "npu"),
        ("mps", (), "inductor"),
        ("cuda", ("Triton",), "inductor"),
        ("npu", ("Npu",), "inductor"),
        ("cuda", ("Triton", "Inductor"), "reference"),
    ],
)
def test_chooses_by_the_device_and_what_can_run_there(monkeypatch, package, device_type, lacking, module):
    kernels = importlib.import_module(f"fuseplug_{package}.functional").KERNELS
    assert [kernel.__name__.startswith(("Npu", "Triton", "Inductor")[at]) for at, kernel in enumerate(kernels)] == [
        True
    ] * 3
    for kernel in kernels:
        why = "it is not installed" if kernel.__name__.startswith(lacking) else None
        monkeypatch.setattr(kernel, "unavailable", lambda self, device_type, why=why: why)
    if module == "inductor" and not kernels[2]().runs_on(device_type):  # Inductor's kernel for the loss is for CPUs
        module = "reference"
    found = functional._choose(device_type, kernels)
    assert found.startswith(f"fuseplug_{package}.{module if module == 'reference' else f'backends.{module}'}")


CALLS = {
    "swiglu": lambda f, x: f(x, x),
    "rope": lambda f, x: f(x, x, x[:1].cos(), x[:1].sin())[0],
    "moe": lambda f, x: f(
        x, x.new_zeros(len(x), 1).long(), x[:, :1].sigmoid(), x.new_ones(2, 8, 4), x.new_ones(2, 4, 4)
    ),
    "linear_cross_entropy": lambda f, x: f(x, x.new_ones(5, 4).cumsum(0), torch.arange(len(x), device=x.device)),
}


@pytest.mark.parametrize("package", CALLS)
def test_computes_what_the_kernel_of_the_device_does(device, package):
    door = getattr(importlib.import_module(f"fuseplug_{package}"), package)
    kernel = getattr(importlib.import_module(f"fuseplug_{package}.backends.triton"), package)
    x = torch.randn(3, 4, device=device)
    assert torch.equal(CALLS[package](door, x), CALLS[package](kernel, x))


def test_is_one_graph(device):
    from fuseplug_swiglu import swiglu

    torch.compiler.reset()
    x = torch.randn(3, 4, device=device)
    torch.testing.assert_close(torch.compile(swiglu, backend="aot_eager", fullgraph=True)(x, x), swiglu(x, x))
