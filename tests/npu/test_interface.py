"""Code of LLaMA-Factory's users works on an NPU with only its import changed."""

import json
import types
import warnings
from pathlib import Path

import pytest
import torch
from support.thorough import first_quick
from support.tiny import build

from fuseplug import manager
from fuseplug.patching import our_marks

pytestmark = pytest.mark.usefixtures("small_checks")

ROOT = Path(__file__).parents[2]

NPU_KERNELS = [
    f"npu_fused_{op}" for op in ("gated_delta_rule", "linear_cross_entropy", "moe", "rmsnorm", "rope", "ssd", "swiglu")
]


def test_what_there_is(host_npu):
    from fuseplug.interface import get_default_kernels, scan_all_kernels

    assert set(NPU_KERNELS) <= scan_all_kernels().keys()
    assert get_default_kernels()[: len(NPU_KERNELS)] == NPU_KERNELS


DENSE = {"npu_fused_rmsnorm", "npu_fused_rope", "npu_fused_swiglu"}


def fused_in(model):
    return {mark.kernel_id for module in model.modules() for mark in our_marks(module).values()}


@pytest.mark.parametrize(
    ("name", "expected"),
    first_quick(
        [("qwen3", DENSE), ("qwen3_moe", {"npu_fused_rmsnorm", "npu_fused_rope", "npu_fused_moe"})],
    ),
)
def test_every_default_kernel_in_a_loop(host_npu, name, expected):
    from fuseplug.interface import apply_kernel, get_default_kernels

    model = build(name).to("npu")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for kernel_id in get_default_kernels()[: len(NPU_KERNELS)]:
            model = apply_kernel(kernel_id, model=model)
    assert fused_in(model) == expected
    said = [str(warning.message) for warning in warned if "asked for by name" in str(warning.message)]
    assert sorted(message.partition(" ")[0] for message in said) == sorted({*NPU_KERNELS} - expected)
    manager.undo(model)
    assert fused_in(model) == set()


def test_names_of_the_kernels_classes(host_npu):
    from fuseplug import interface

    classes = [interface.NpuRMSNormKernel, interface.NpuSwiGluKernel, interface.NpuRoPEKernel]
    classes += [interface.NpuFusedMoEKernel]
    ids = ["npu_fused_rmsnorm", "npu_fused_swiglu", "npu_fused_rope", "npu_fused_moe"]
    assert [(kernel._kernel_id, kernel._device) for kernel in classes] == [(name, "npu") for name in ids]
    answers = json.loads((ROOT / "docs/coverage.json").read_text())["releases"]["5.24.0"]["answers"]
    fused = {row["name"] for row in answers if row["op"] == "swiglu" and row["how"] == "fused"}
    assert interface.NpuSwiGluKernel.expect_modules <= fused


def test_functions(host_npu):
    from fuseplug.interface import GmmFunction, npu_swiglu_forward

    mlp = build("qwen3").to("npu").model.layers[0].mlp
    x = torch.randn(3, 5, mlp.hidden_size, device="npu")
    expected = mlp(x)
    host_npu.calls.clear()
    assert torch.allclose(types.MethodType(npu_swiglu_forward, mlp)(x), expected, rtol=1e-5, atol=1e-7)
    assert host_npu.calls["npu_swiglu"]

    rows, weight = torch.randn(6, 16, device="npu"), torch.randn(3, 16, 8, device="npu", requires_grad=True)
    made = GmmFunction.apply(rows, weight, torch.tensor([2, 0, 4], device="npu"))
    assert torch.allclose(made, torch.cat([rows[:2] @ weight[0], rows[2:] @ weight[2]]), rtol=1e-5, atol=1e-5)
    made.sum().backward()
    assert not weight.grad[1].any()
    assert weight.grad[2].any()
