"""What ``fuseplug doctor`` says about an NPU."""

import pytest
from torch.nn import functional

from fuseplug_host_npu import HostNPU
from fuseplug_tools.ascend import attention
from fuseplug_tools.machine import look


def test_attention_of_torch_is_that_of_torch_npu(host_npu):
    said = attention(look())
    assert (said.state, said.remedy) == ("ok", "")
    assert "runs npu_fusion_attention" in said.found
    assert any("fusion_attention" in op for op in host_npu.calls)


def in_steps(query, key, value):
    return (query @ key.mT).softmax(-1) @ value


def raising(query, key, value):
    raise RuntimeError("aclnnFlashAttentionScore is not in libopapi.so")


@pytest.mark.parametrize(
    ("instead", "found", "remedy"),
    [
        (in_steps, "runs no npu_fusion_attention: its gradient is ", "flash_attention_2"),
        (raising, "raises RuntimeError: aclnnFlashAttentionScore is not in libopapi.so", ""),
    ],
)
def test_another_attention_is_told(host_npu, monkeypatch, instead, found, remedy):
    monkeypatch.setattr(functional, "scaled_dot_product_attention", instead)
    said = attention(look())
    assert (said.state, found in said.found, remedy in said.remedy) == ("warn", True, True)


@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend910_9382"])
def test_a_report_names_the_chip_and_what_is_missing(host_npu, run, chip):
    with HostNPU(soc=chip):
        out = " ".join(run("report")[1].split())
    assert f"npu (1 × {chip})" in out
    assert "warn CANN unknown: ASCEND_HOME_PATH is not set" in out
    assert "runs npu_fusion_attention (FlashAttentionScore)" in out
