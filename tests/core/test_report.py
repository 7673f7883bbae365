"""The report says everything that a person needs, once, in text and as data."""

import json

import pytest
from support.kernels import ExpertsKernel, NormKernel, RotaryKernel, variant_of
from support.managers import manager_of
from support.models import Experts, Norm, Toy
from torch import nn

from fuseplug import Rejection


@pytest.fixture(scope="module")
def everything():
    """A report with one answer of each kind."""
    manager = manager_of()
    manager.register(variant_of(NormKernel, "a_best", priority=5, function="support.bad:zeros"))
    manager.register(variant_of(NormKernel, "b_good", priority=4))
    manager.register(variant_of(NormKernel, "c_spare", priority=3))
    manager.register(
        variant_of(NormKernel, "d_broken", match=lambda self, site: 1 / 0 if hasattr(site.module, "q") else None)
    )
    manager.register(variant_of(NormKernel, "e_elsewhere", device_types=("npu",)))
    manager.register(variant_of(NormKernel, "f_forward", differentiable=False))
    manager.register(variant_of(NormKernel, "g_left_out"))
    manager.register(
        variant_of(
            NormKernel,
            "h_picky",
            match=lambda self, site: (
                Rejection("needs act_fn to be fused; call fuse()") if hasattr(site.module, "gate") else None
            ),
        )
    )
    manager.register(ExpertsKernel)
    model = nn.ModuleDict({"toy": Toy(), "block": Experts(), "foreign": Norm(), "odd": Norm()})
    model["foreign"].forward = lambda x: x
    model["odd"].__class__ = type("Odd", (Norm,), {"forward": lambda self, x: x * 2})
    return manager.plan(model, exclude="g_left_out").report


SAID = {
    "winner": "b_good",
    "variant": "llama",
    "check": "passed on cpu",
    "where": "toy.layers.*.norm1",
    "failed": "its numbers are wrong for float32",
    "outranked": "outranked by b_good",
    "raised": "ZeroDivisionError while matching",
    "who raised": "[(registered)]",
    "unsupported": "needs act_fn to be fused; call fuse()",
    "covered": "no longer called",
    "foreign": "call apply_all before that is put on, or take it off first",
    "unlike": "computes none of the known variants",
    "elsewhere": "runs on npu; this model is planned for cpu",
    "inference only": 'has no gradient: used with mode="inference"',
    "left out": "left out by exclude=",
    "count": "of 12 targets would be fused for training on cpu",
}


@pytest.mark.parametrize("what", SAID)
def test_the_text_says(everything, what):
    unwrapped = " ".join(str(everything).split())
    assert (
        SAID[what] in unwrapped
        or SAID[what].replace(" ", "") in unwrapped.replace(" ", "")
        or _in_cells(str(everything), SAID[what])
    )


def _in_cells(text, said):
    """Whether *text*, whose long cells are folded, contains every word of *said*."""
    return all(word in text for word in said.split())


def test_the_data_has_every_entry_and_every_kernel_and_can_be_written_as_json(everything):
    data = everything.to_dict()
    assert json.loads(json.dumps(data)) == data
    assert len(data["entries"]) == len(everything.entries) == data["fused"] + data["left_alone"]
    for entry, written in zip(everything.entries, data["entries"], strict=True):
        assert written["paths"] == list(entry.paths)
        assert written["kernel"] == entry.kernel_id
        assert [(r["kernel"], r["kind"], r["reason"]) for r in written["rejections"]] == [
            (kernel, r.kind, r.reason) for kernel, r in entry.rejections
        ]
        assert (written["outranked"], written["covered_by"]) == (list(entry.outranked), entry.covered_by)
    assert {kernel["id"] for kernel in data["kernels"]} >= {"a_best", "g_left_out", "toy_experts"}


def test_every_candidate_is_answered_exactly_once(everything):
    answered = [(path, entry.target) for entry in everything.entries for path in entry.paths]
    assert len(answered) == len(set(answered))
    norms = {f"toy.layers.{i}.norm{j}" for i in (0, 1) for j in (1, 2)} | {"toy.norm"}
    others = {f"toy.layers.{i}.mlp" for i in (0, 1)}
    block = {"block", "block.experts.0", "block.experts.1"}
    assert {path for path, _ in answered} >= norms | others | block | {"foreign", "odd"}
    (why,) = everything.raised.values()
    assert why.startswith("asked about toy.layers.0.attention and 1 more: ZeroDivisionError")


def test_whatever_is_left_alone_has_a_reason(everything):
    assert everything.left_alone
    assert all(entry.why_not for entry in everything.left_alone)
    assert not any(entry.why_not for entry in everything.fused)


def test_a_kernel_that_found_nothing_of_its_business_is_idle_with_a_reason(manager):
    manager.register(NormKernel)
    manager.register(RotaryKernel)
    report = manager.plan(Norm()).report
    assert "this model has no module with this op" in report.idle["toy_rotary"]
    assert "toy_norm" not in report.idle
    assert "toy_rotary" in str(report)


def test_the_notes_tell_of_kernels_that_transformers_sets_again(fusing, model):
    model._use_kernels = True
    report = fusing.plan(model).report
    assert any("use_kernels=True" in note and "apply_all after" in note for note in report.notes)
    assert "note: this model has use_kernels=True" in " ".join(str(report).split())


def test_the_text_of_a_large_model_is_short(fusing):
    few, many = (len(str(fusing.plan(Toy(layers=n)).report).splitlines()) for n in (2, 12))
    assert few == many
