"""Use the installed wheels as a stranger would: from another folder, with nothing but their own requirements."""

from __future__ import annotations

import sys
from importlib.metadata import distributions, entry_points
from pathlib import Path

import torch
from torch import nn

import fuseplug
from fuseplug import manager
from fuseplug.hookspecs import resolve

KERNELS = [
    f"inductor_fused_{op}"
    for op in (
        "causal_conv1d",
        "gated_delta_rule",
        "linear_cross_entropy",
        "moe",
        "rmsnorm",
        "rope",
        "selective_scan",
        "ssd",
        "swiglu",
    )
]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * unit.to(x.dtype)


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


checkout = Path(sys.argv[1]).resolve()
assert checkout not in Path(fuseplug.__file__).resolve().parents or ".nox" in fuseplug.__file__, fuseplug.__file__
assert (Path(fuseplug.__file__).parent / "py.typed").exists()
plugins = [entry.value for entry in entry_points(group="pytest11") if entry.value.startswith("fuseplug")]
assert not plugins, f"every pytest of this environment would load {plugins}"
installed = {each.name.replace("_", "-") for each in distributions()}
assert not installed & {"torch-npu", "liger-kernel", "fuseplug-liger", "fuseplug-testing", "fuseplug-host-npu"}, (
    installed
)
ready = {record.kernel_id: record.kernel for record in manager.kernels() if record.state == "ready"}
assert sorted(ready) == KERNELS, manager.kernels()
lacking = ready["inductor_fused_rmsnorm"].unavailable("cpu")

model = nn.Sequential(Norm(64), GatedMLP(64, 160), Norm(64), GatedMLP(64, 160))
x = torch.randn(4, 300, 64)
before = model(x)
applied = manager.apply_all(model, every_size=True)
print(applied.report)
fused = [entry.kernel_id for entry in applied.report.fused]
assert fused == ([] if lacking else ["inductor_fused_rmsnorm", "inductor_fused_swiglu"] * 2), lacking
torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
applied.undo()
assert torch.equal(model(x), before)

# This environment has no numpy, and torch works without it. Small buffers are read all the same.
assert not manager.plan(nn.Sequential(nn.BatchNorm1d(4))).report.entries

for kernel_id, kernel in ready.items():
    specimen = resolve(kernel.specimens)()[0]
    report = manager.plan(specimen, allow="lazy_logits").report
    assert lacking or kernel_id in [entry.kernel_id for entry in report.fused], report
for device, how, extra in (("npu", "npu", "npu"), ("cuda", "triton", "cuda")):
    elsewhere = manager.plan(model.to("meta"), device=device).report
    assert {entry.kernel_id for entry in elsewhere.fused} == {f"{how}_fused_rmsnorm", f"{how}_fused_swiglu"}, elsewhere
    assert any(f"fuseplug-rmsnorm[{extra}]" in note for note in elsewhere.notes), elsewhere
print("the wheels work")
