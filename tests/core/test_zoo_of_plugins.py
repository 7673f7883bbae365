"""Hostile distributions, all installed at once: Fuseplug still does its work, and names each of them."""

import json
import signal
import subprocess
import sys

import pytest
import torch
from support.models import Toy, inputs

from fuseplug import KernelManager

KERNEL = """
from fuseplug import BaseKernel

class Kernel(BaseKernel):
    kernel_id = "{}"
    op = function = reference = "a:b"

    def match(self, site):
        {}

"""
GREEDY = """
        from fuseplug import Example, Proposal, Target
        from support.kernels import NormAdapter
        import torch
        example = lambda mix, size, generator: Example((torch.randn(size // 16, 16, generator=generator),))
        return [Proposal(Target(), (NormAdapter("greedy", "eps"),), example, (torch.float32,))]

    priority = 9
    reference = "support.kernels:norm_reference"
    function = "support.bad:zeros"
"""
RIGHT = """
from fuseplug import BaseKernel

class Kernel(BaseKernel):
    kernel_id, op = "toy_norm", "toynorm"
    function, reference = "support.kernels:fused_norm", "support.kernels:norm_reference"

    def match(self, site):
        from support.kernels import NormKernel
        return NormKernel().match(site)
"""
ON_IMPORT = {
    "raises": ("1 / 0", "ZeroDivisionError: division by zero"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "slow": ("import time; time.sleep(0.6)", "importing x_slow takes 0."),
    "later": ("Kernel.api = 2", "it was written for API 2"),
}
"""What each does on import, and what Fuseplug says of it."""

IN_MATCH = {
    "mutates": ("site.module.seen = True", "it changed the module it was asked about"),
    "leaves": ("raise SystemExit(3)", "SystemExit while matching: 3"),
    "says-yes": ("return True", "must give a list of Proposals, a Rejection or None; it gave True"),
    "greedy": (GREEDY, "computes none of the known variants"),
}
"""What each does when it is asked about a module, and what Fuseplug says of it."""

BY_METADATA = {
    "x-clash:toy_norm": "the id is that of toy, which stays in force; uninstall x-clash",
    "x-one:both": "claimed by x-one:both and x-two:both",
    "x-two:both": "claimed by x-one:both and x-two:both",
    "x-needs:needs": "needs no-such-thing",
}
"""What Fuseplug says of kernels that it does not import."""


@pytest.fixture
def zoo(package, site):
    """All hostile distributions, and one with a right kernel."""
    for name, (text, _) in ON_IMPORT.items():
        package(f"x-{name}", name, source=KERNEL.format(name, "return None") + text)
    for name, (text, _) in IN_MATCH.items():
        package(f"x-{name}", name, source=KERNEL.format(name, text.strip()))
    package("x-needs", "needs", requires=["no-such-thing"])
    for name in ("x-one", "x-two"):
        package(name, "both")
    package("x-clash", "toy_norm")
    if not (site / "toy.py").exists():
        package("toy", "toy_norm", source=RIGHT)


@pytest.fixture
def hangs(package):
    package("x-hangs", "hangs", source="import time; time.sleep(3600)")


SAID = {
    **{f"x-{name}:{name}": what for name, (_, what) in ON_IMPORT.items()},
    **BY_METADATA,
}


@pytest.mark.usefixtures("zoo")
def test_apply_all_does_its_work_and_names_each():
    manager = KernelManager({})
    model = Toy().eval()
    want = model(inputs())
    ours = [record.name for record in manager.kernels() if record.distribution.startswith("fuseplug-")]
    applied = manager.apply_all(model, exclude=ours)
    report = applied.report
    assert {entry.kernel_id for entry in report.fused} == {"toy_norm"}
    assert len(report.fused) == 5
    torch.testing.assert_close(model(inputs()), want)
    applied.undo()
    assert torch.equal(model(inputs()), want)
    records = {record.name: record for record in report.records}
    for name, what in SAID.items():
        assert what in "\n".join([records[name].reason, *records[name].import_costs]), name
    said = {(kernel_id, why.reason) for entry in report.entries for kernel_id, why in entry.rejections}
    for name, (_, what) in IN_MATCH.items():
        assert any(kernel_id == name and what in reason for kernel_id, reason in said), (name, said)


@pytest.mark.usefixtures("zoo")
def test_list_does_its_work_and_names_each(fresh_python):
    done = fresh_python("-m", "fuseplug", "list", "--json")
    records = {f"{each['distribution']}:{each['id']}": each for each in json.loads(done.stdout)}
    assert records["toy:toy_norm"]["state"] == "ready"
    for name, what in SAID.items():
        each = records[name]
        said = "\n".join([each["reason"], *each["import_costs"]])
        assert what in said, (name, said)


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_a_hang_is_named_while_it_lasts_and_when_it_is_interrupted(hangs, fresh_python):
    code = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
from fuseplug import cli
from fuseplug.discovery import import_cost
import_cost.PATIENCE = 0.2
cli.main(["list"])
"""
    command = [sys.executable, "-c", code]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        while "x_hangs" not in (told := running.stderr.readline()):
            assert told, "it ended"
        assert told.startswith("fuseplug: still importing x_hangs, for kernel x-hangs:hangs; Ctrl-C stops it")
        running.send_signal(signal.SIGINT)
        _, error = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert "interrupted while importing kernel x-hangs:hangs" in error
    assert "FUSEPLUG_KERNELS=-hangs" in error
    assert fresh_python("-m", "fuseplug", "list", FUSEPLUG_KERNELS="-hangs").returncode == 0


def test_an_interrupt_in_match_names_the_kernel(package):
    package("x-stops", "stops", source=KERNEL.format("stops", "raise KeyboardInterrupt"))
    manager = KernelManager({"FUSEPLUG_ALLOW": "x-stops"})
    with pytest.raises(KeyboardInterrupt, match="while kernel stops of x_stops was asked about the model; exclude='st"):
        manager.apply_all(torch.nn.Linear(1, 1))
