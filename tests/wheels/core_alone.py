"""Use core and verify with nothing else installed, as a stranger would: they list, plan, and name what is missing."""

import subprocess
import sys
from importlib.metadata import distributions

import torch
from torch import nn

from fuseplug import BaseKernel, KernelManager, PlanError, Rejection

ours = {each.name for each in distributions() if each.name.startswith("fuseplug")}
assert ours == {"fuseplug", "fuseplug-verify"}, ours


class Looks(BaseKernel):
    """Answers, so that the plan has an entry."""

    kernel_id = op = "looks"
    function = reference = "torch.nn.functional:silu"

    def match(self, site):
        return Rejection("it only looks") if isinstance(site.module, nn.SiLU) else None


manager = KernelManager({})
assert manager.kernels() == []
manager.register(Looks)
model = nn.Sequential(nn.Linear(3, 3), nn.SiLU())
report = manager.plan(model).report
assert [entry.why_not for entry in report.entries] == ["looks: it only looks"], report
before = [dict(vars(module)) for module in model.modules()]
said = ""
try:
    manager.apply_all(model, measure={"input": torch.ones(1, 3)})
except PlanError as error:
    said = str(error)
assert said == "measure= needs fuseplug-tools, which is not installed: pip install fuseplug-tools", said
assert [dict(vars(module)) for module in model.modules()] == before


def fuseplug(*args):
    return subprocess.run([sys.executable, "-m", "fuseplug", *args], capture_output=True, text=True, check=False)


listed = fuseplug("list")
assert (listed.returncode, listed.stderr) == (0, ""), listed
assert listed.stdout.startswith("No kernels are installed."), listed
for command in ("bench", "run", "new", "check", "doctor", "cache"):
    refused = fuseplug(command, "--option")
    assert refused.returncode == 2, refused
    assert "not installed: pip install fuseplug-tools" in refused.stderr, refused
print("core works alone")
