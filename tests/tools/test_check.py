"""``fuseplug check`` needs the kit."""

import json
import sys

from support.fixtures import ACTIVATION


def test_of_two_kernels_with_one_id_the_distribution_says_which(run, package):
    package("x-one", "silu", source=ACTIVATION)
    package("x-two", "silu", source=ACTIVATION)
    code, out, err = run("check", "silu")
    assert (code, out) == (2, "")
    assert "silu is in conflict: claimed by x-one:silu and x-two:silu" in err
    code, out, _ = run("check", "x-two:silu", "--checks", "declaration", "--json")
    (found,) = json.loads(out)
    assert found["kernel"]["distribution"] == "x-two"
    assert code == 1
    assert "it names no specimens" in found["checks"][0]["faults"][0]["what"]


def test_without_the_kit_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "fuseplug_testing", None)
    code, _, err = run("check")
    assert (code, err) == (2, 'fuseplug: `fuseplug check` needs the conformance kit: pip install "fuseplug[testing]"\n')
