"""Use the installed wheels as a stranger would: from elsewhere, with nothing but what they themselves require."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import fuseplug
from fuseplug import manager


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * unit.to(x.dtype)


checkout = Path(sys.argv[1]).resolve()
assert checkout not in Path(fuseplug.__file__).resolve().parents or ".nox" in fuseplug.__file__, fuseplug.__file__
assert (Path(fuseplug.__file__).parent / "py.typed").exists()
ready = [record.kernel_id for record in manager.kernels() if record.state == "ready"]
assert ready == ["inductor_fused_rmsnorm"], manager.kernels()

model = nn.Sequential(nn.Linear(64, 64), Norm(64), nn.Linear(64, 64), Norm(64))
x = torch.randn(4, 300, 64)
before = model(x)
applied = manager.apply_all(model)
print(applied.report)
fused = [entry.kernel_id for entry in applied.report.fused]
lacking = manager.kernels()[0].kernel.unavailable("cpu")
assert fused == ([] if lacking else ["inductor_fused_rmsnorm"] * 2), lacking
torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
applied.undo()
assert torch.equal(model(x), before)
print("the wheels work")
