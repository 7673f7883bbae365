"""What LLaMA-Factory's users write, on an NPU, with nothing changed but the line that imports it."""

from __future__ import annotations

import pytest
from support.thorough import first_quick
from support.tiny import build, step

from fuseplug import manager

NPU_KERNELS = [f"npu_fused_{op}" for op in ("linear_cross_entropy", "moe", "rmsnorm", "rope", "swiglu")]


@pytest.fixture
def model(host_npu):
    return build("qwen3").to("npu")


def fused_by(model):
    applied = manager.applied_to(model)
    return set() if applied is None else {entry.kernel_id for entry in applied.report.fused}


def test_what_there_is(host_npu):
    from fuseplug.interface import get_default_kernels, scan_all_kernels

    assert set(NPU_KERNELS) <= scan_all_kernels().keys()
    assert get_default_kernels()[:5] == NPU_KERNELS


def test_one_kernel(host_npu, model):
    from fuseplug.interface import apply_kernel

    model = apply_kernel("npu_fused_rmsnorm", model=model)
    assert fused_by(model) == {"npu_fused_rmsnorm"}
    host_npu.calls.clear()
    step(model)
    assert host_npu.calls["npu_rms_norm"]
    manager.undo(model)
    host_npu.calls.clear()
    step(model)
    assert not host_npu.calls["npu_rms_norm"]


DENSE = {"npu_fused_rmsnorm", "npu_fused_rope", "npu_fused_swiglu"}


@pytest.mark.parametrize("include", first_quick(["auto", True, ",".join(sorted(DENSE))]))
def test_the_default_kernels(model, include):
    from fuseplug.interface import apply_default_kernels

    model = apply_default_kernels(model=model, include_kernels=include)
    assert fused_by(model) == DENSE
    manager.undo(model)
    assert fused_by(model) == set()


def test_the_plugin(model):
    from fuseplug.interface import KernelPlugin

    model = KernelPlugin("auto")(model=model, include_kernels="npu_fused_rope,npu_fused_swiglu")
    assert fused_by(model) == {"npu_fused_rope", "npu_fused_swiglu"}
    assert KernelPlugin("auto")(model=build("qwen3"), include_kernels=None) is not None


def test_the_classes(model):
    from fuseplug.interface import NpuRMSNormKernel, NpuRoPEKernel, NpuSwiGluKernel

    for kernel in (NpuRMSNormKernel, NpuSwiGluKernel, NpuRoPEKernel):
        model = kernel.apply(model=model)
        assert kernel.kernel_id in fused_by(model)


def test_a_mixture_of_experts(host_npu):
    from fuseplug.interface import NpuFusedMoEKernel, apply_default_kernels

    assert fused_by(NpuFusedMoEKernel.apply(model=build("qwen3_moe").to("npu"))) == {"npu_fused_moe"}
    # It has no gated MLP, and nobody was asked whether its logits may be lazy.
    expected = {*NPU_KERNELS} - {"npu_fused_swiglu", "npu_fused_linear_cross_entropy"}
    assert fused_by(apply_default_kernels(build("qwen3_moe").to("npu"), "auto")) == expected
