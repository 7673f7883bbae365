"""Numbers on the stand-in are those of the CPU, and gradients come from torch_npu's own formulas."""

from __future__ import annotations

import pytest
import torch


def test_rms_norm_is_differentiated_by_torch_npu(host_npu):
    x = torch.randn(5, 8)
    weight = torch.rand(8)
    ours = [tensor.to("npu").requires_grad_() for tensor in (x, weight)]
    theirs = [tensor.clone().requires_grad_() for tensor in (x, weight)]
    torch.ops.npu.npu_rms_norm(*ours, 1e-6)[0].square().sum().backward()
    torch.nn.functional.rms_norm(theirs[0], (8,), theirs[1], 1e-6).square().sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)
    assert host_npu.calls["npu_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1


def test_shapes_alone_will_do(fake_npu):
    x = torch.empty(5, 8, device="npu", requires_grad=True)
    torch.ops.npu.npu_swiglu(x).sum().backward()
    assert x.grad.shape == x.shape
    with pytest.raises(ValueError, match="x must be of an even size along dim -1"):
        torch.ops.npu.npu_swiglu(x[:, :7])
