"""The survey tells right from wrong, and what it published still holds."""

import json
import os
import random
from pathlib import Path

import pytest
import torch
import transformers
from support import bad, kernels
from support.models import GemmaNorm, Toy, inputs
from support.tasks import works
from support.thorough import thorough
from torch import nn

from fuseplug import KernelManager, Rejection
from fuseplug_verify.verification.kernel_check import KernelCheck

from . import checking, pool, run
from .census import LOSS, OPS, Census
from .changes import changes
from .checking import ROUNDINGS, TIMES, check, comparison, elsewhere, sites
from .collect import Answer
from .feeding import Call
from .kernel_kinds import KERNEL_KINDS
from .page import to_markdown, without_devices
from .run import Kept

PUBLISHED = Path(__file__).parents[2] / "docs" / "coverage.json"
SAMPLE = 3


def published():
    return json.loads(PUBLISHED.read_text())


def sample():
    """A few of the compared models: different ones in each run, the same ones in all processes of one run."""
    release = published()["releases"].get(transformers.__version__, {"records": []})
    models = [r for r in release["records"] if "model_type" in r and r["status"] == "checked"]
    quick = [r for r in models if r["seconds"] < 20 and r["parameters"] < 1e6]
    chance = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    return [pytest.param(r, id=r["model_type"]) for r in chance.sample(quick, min(SAMPLE, len(quick)))]


def surveyed(record):
    """An environment without the kernels of ops that are newer than *record*."""
    release = published()["releases"][transformers.__version__]
    known = {*release["summary"]["ops"], *(site["op"] for site in record["sites"])}
    # Judged by names, because a kernel for another device is not loaded, but still takes part in plans.
    names = [kernel.kernel_id for kernel in KernelManager(environ={}).kernels()]
    newer = ",".join(f"-{name}" for name in names if not name.endswith(tuple(known)))
    return {"FUSEPLUG_KERNELS": newer} if newer else {}


@thorough
@pytest.mark.parametrize("record", sample())
def test_a_random_sample_of_what_is_published_holds(record):
    found = json.loads(json.dumps(check(KernelManager(environ=surveyed(record)), Census.of(), record["model_type"])))
    if found.get("why", "").startswith(("ImportError", "ModuleNotFoundError")):
        pytest.skip(found["why"])
    assert found["status"] == "checked", found
    assert fused(found) == fused(record)
    for device, plan in record["elsewhere"].items():
        assert found["elsewhere"][device]["fused"] == plan["fused"]


def fused(record):
    """The fused sites. The others are not compared: a site that had no row in the report may have one by now."""
    return [
        [site[name] for name in ("op", "folder", "class", "target", "count", "variant")]
        for site in record["sites"]
        if site["fused"]
    ]


def test_nothing_is_wrong_in_what_is_published():
    for release in published()["releases"].values():
        assert release["summary"]["mismatches"] == []
        for records in [release["records"], *without_devices(release).values()]:
            assert not [record["model_type"] for record in records if record["status"] == "mismatch"]


def test_nothing_that_is_published_is_without_an_answer():
    for release in published()["releases"].values():
        assert release["summary"]["sites without an answer"] == 0
        assert not [record["model_type"] for record in release["records"] if record.get("unanswered")]


def test_the_page_says_what_the_records_say():
    content = published()
    page = to_markdown(content["releases"], content["machine"], ROUNDINGS, TIMES)
    assert PUBLISHED.with_suffix(".md").read_text() == page


def test_the_readme_says_what_the_records_say():
    summaries = [release["summary"] for release in published()["releases"].values()]
    types = [summary["model types"] for summary in summaries]
    rows = {
        "transformers": [*published()["releases"]],
        "classes of norms fused": fused_of(summaries, "rmsnorm"),
        "classes of gated MLPs fused": fused_of(summaries, "swiglu"),
        "rotary functions fused": fused_of(summaries, "rope"),
        "classes of experts fused": fused_of(summaries, "moe"),
        "classes of linear attention and state spaces fused: convolutions, delta rules, scans": fused_of(
            summaries, "causal_conv1d", "gated_delta_rule", "selective_scan", "ssd"
        ),
        **(
            {"models whose loss is fused with their head": fused_of(summaries, LOSS)}
            if all(LOSS in summary["ops"] for summary in summaries)
            else {}
        ),
        "model types with any of them, compared with themselves unfused": [
            f"{each['checked']} of {each['with any of the ops']}" for each in types
        ],
        "… these with the NPU kernels, on the stand-in in host memory, which cannot run the others": (
            compared_by("npu")
        ),
        "… these with the Triton kernels, in Triton's interpreter": compared_by("triton"),
        "… that computed something else with any kernels; sites without an answer": [
            f"{len(summary['mismatches'])}; {summary['sites without an answer']}" for summary in summaries
        ],
    }
    readme = (PUBLISHED.parents[1] / "README.md").read_text()
    for name, cells in rows.items():
        assert f"| {name} | {' | '.join(cells)} |" in readme, name


def compared_by(kind):
    runs = [without_devices(release).get(kind) for release in published()["releases"].values()]
    return [f"{sum(r['status'] == 'checked' for r in run)} of {len(run)}" if run else "not run" for run in runs]


def fused_of(summaries, *ops):
    numbers = [[summary["ops"].get(op) for op in ops] for summary in summaries]
    return [
        "not run" if None in some else f"{sum(of['fused'] for of in some)} of {sum(of['of'] for of in some)}"
        for some in numbers
    ]


# --- what the comparison sees


def only_registered():
    return KernelManager(environ={}, find=lambda environ, registered: list(registered))


def manager_with(function):
    """A manager with one kernel."""
    manager = only_registered()
    manager.register(kernels.variant_of(kernels.NormKernel, function=f"{function.__module__}:{function.__name__}"))
    return manager


@pytest.fixture
def unjudged(monkeypatch):
    """Let wrong kernels through, so that the comparison of whole models sees them."""
    for judge in ("_judged", "_wrong_in", "_fails"):
        monkeypatch.setattr(KernelCheck, judge, lambda *_, **__: None)


def test_a_right_kernel_is_right():
    report, found = comparison(manager_with(kernels.fused_norm), Toy(), [Call("", {"x": inputs()})])
    assert report.fused
    assert found["wrong"] == []
    assert found["undo"] is True


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (bad.wrong_weight_gradient, torch.float32),
        (bad.wrong_gradient, torch.float32),
        (bad.detached_weight, torch.float32),
        (bad.without_offset, torch.bfloat16),
        (bad.detached_weight, torch.bfloat16),
        (bad.zeros, torch.bfloat16),
    ],
)
def test_a_wrong_kernel_is_a_mismatch(unjudged, function, dtype):
    _, found = comparison(manager_with(function), Toy(norm=GemmaNorm).to(dtype), [Call("", {"x": inputs()})])
    assert found["wrong"]


def test_the_models_are_small_and_their_calls_are_the_kernels_all_the_same(unjudged, monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")  # the survey runs outside of pytest
    manager = only_registered()
    wrong = f"{bad.zeros.__module__}:{bad.zeros.__name__}"
    manager.register(kernels.variant_of(kernels.NormKernel, function=wrong, gains_from=lambda self, use: 1 << 30))
    _, found = comparison(manager, Toy(norm=GemmaNorm), [Call("", {"x": inputs()})])
    assert found["wrong"]


def test_what_should_be_zero_and_is_not_is_a_mismatch(unjudged):
    model = Toy(norm=GemmaNorm)
    with torch.no_grad():
        model.norm.weight.fill_(-1)
    _, found = comparison(manager_with(bad.without_offset), model, [Call("norm", {"hidden_states": inputs()})])
    assert found["worst"] == float("inf")


def test_a_class_of_the_census_that_no_kernel_speaks_of_is_without_an_answer():
    class LlamaRMSNorm(nn.Module):
        __module__ = "transformers.models.llama.modeling_llama"

    model = nn.Sequential(LlamaRMSNorm(), nn.Linear(2, 2))
    report = only_registered().plan(model).report
    found = Census.of("5.24.0").unanswered(model, report)
    assert [(each["op"], each["class"], each["path"]) for each in found] == [("rmsnorm", "LlamaRMSNorm", "0")]


def test_what_is_planned_for_a_device_that_is_not_here_is_counted_by_kernel():
    manager = only_registered()
    manager.register(kernels.variant_of(kernels.NormKernel, "npu_norm", device_types=("npu",)))
    manager.register(kernels.variant_of(kernels.NormKernel, "any_norm"))
    assert elsewhere(manager, Toy(), "npu")["fused"] == {"npu": 5}
    assert elsewhere(manager, Toy(), "cuda")["fused"] == {"any": 5}


@pytest.mark.parametrize(
    ("kernels", "lacking"),
    [
        ("npu", {"causal_conv1d", "selective_scan"}),
        ("triton", {"causal_conv1d", "gated_delta_rule", "selective_scan", "ssd"}),
    ],
)
def test_kernels_for_other_devices_are_surveyed_by_themselves(kernels, lacking):
    on = [record.kernel_id for record in KERNEL_KINDS[kernels].manager().kernels() if record.state != "off"]
    assert sorted(on) == [f"{kernels}_fused_{op}" for op in sorted({*OPS} - lacking)]


def test_a_site_is_counted_as_called_only_if_it_is():
    model = Toy(layers=2)
    report = manager_with(kernels.fused_norm).plan(model).report
    (found,) = sites(model, report, called={("toynorm", "norm"), ("toynorm", "layers.0.norm1")})
    assert (found["count"], found["called"]) == (5, 2)


def test_calls_under_autocast_are_counted():
    _, found = comparison(manager_with(kernels.fused_norm), Toy(), [Call("", {"x": inputs()})])
    for dtype in ("bfloat16", "float16"):
        (row,) = found["autocast"][dtype].values()
        assert row["kernel"] + row["original"] == 5


def test_what_is_not_fused_any_more_is_lost_and_what_is_another_variant_is_said():
    before = [Answer("rmsnorm", "llama", name, "fused", ("llama",)) for name in ("A", "B", "C")]
    now = [
        Answer("rmsnorm", "llama", "A", "left alone", ("unread",)),
        Answer("rmsnorm", "llama", "B", "fused", ("gemma",)),
        Answer("rmsnorm", "llama", "C", "fused", ("llama",), compared=True),
        Answer("rmsnorm", "llama", "D", "left alone", ("new",)),
    ]
    assert [(change.now.name, change.lost) for change in changes(before, now)] == [
        ("A", True),
        ("B", False),
        ("D", False),
    ]
    assert str(next(changes(before, now))) == "LOST rmsnorm llama.A: was fused (llama), is left alone (unread)"


def test_where_nothing_was_proposed_every_op_that_said_why_has_an_answer():
    manager = only_registered()
    for op in ("rmsnorm", "swiglu"):
        declines = {"op": op, "match": lambda self, site: Rejection("no") if type(site.module) is nn.Linear else None}
        manager.register(kernels.variant_of(kernels.NormKernel, f"{op}_of_nothing", **declines))
    model = nn.Sequential(nn.Linear(2, 2))
    found = sites(model, manager.plan(model).report)
    assert [(site["op"], site["class"], site["fused"]) for site in found] == [
        ("rmsnorm", "Linear", False),
        ("swiglu", "Linear", False),
    ]


@pytest.mark.parametrize("missing", [0, 1])
def test_an_op_is_published_once_something_is_known_of_each_of_its_classes(monkeypatch, missing):
    op, release = "gated_delta_rule", "4.57.6"
    before = published()["releases"][release]
    before["summary"]["ops"].pop(op, None)
    for record in before["records"]:
        record["sites"] = [site for site in record.get("sites", ()) if site["op"] != op]
    monkeypatch.setattr(run, "published", lambda: {release: before})
    classes = [
        {"op": op, "folder": folder, "class": name} for folder, name in sorted(Census.of(release).classes[op])[missing:]
    ]
    site = {"target": "", "fused": False, "why": "no", "count": 1}
    records = [each | {"status": "planned", "sites": [each | site]} for each in classes]
    merged = run.among_the_published(release, "inductor", records)
    assert (op in merged["summary"]["ops"]) == (not missing)
    assert len(merged["records"]) >= len(before["records"])
    assert {answer["op"] for answer in merged["answers"]} == {*merged["summary"]["ops"]}


# --- the work


@thorough
def test_a_process_that_hangs_or_dies_loses_only_what_it_was_at():
    found = {}
    tasks = ["first", "dies", "second", "hangs", "third"]
    pool.run(tasks, works, found.__setitem__, jobs=1, limit=15)
    assert {task: record["status"] for task, record in found.items()} == {
        "first": "done",
        "dies": "died",
        "second": "done",
        "hangs": "died",
        "third": "done",
    }
    assert "3" in found["dies"]["why"]


def test_what_was_recorded_with_other_code_is_done_again(tmp_path):
    kept = Kept(tmp_path)
    kept.put("some/model", {"status": "checked"})
    assert kept.get("some/model")["status"] == "checked"
    other = json.loads((path := next(tmp_path.iterdir())).read_text()) | {"code": "other"}
    path.write_text(json.dumps(other))
    assert kept.get("some/model") is None
    assert Kept(tmp_path, any_code=True).get("some/model")["status"] == "checked"


def test_a_gradient_that_is_truly_zero_may_be_another_by_a_rounding_of_the_largest_of_its_call():
    nearly = torch.tensor([1e-9])
    values = {"with labels: large": torch.ones(1), "with labels: none": nearly, "none": nearly}
    noise = checking._noise(values, {"large", "none"})
    shares = {name: checking._share(-value, value, [value], noise[name]) for name, value in values.items()}
    assert {name for name, share in shares.items() if share <= 1} == {"with labels: none"}
