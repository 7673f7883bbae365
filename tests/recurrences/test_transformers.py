"""The recurrences of transformers: whole models compute what they did before, and every class is found."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from support import delta_rules, scans, ssd
from support.modeling_files import targets_beside
from support.parity import ROUNDINGS, distance
from support.thorough import quick_if
from support.tiny import build, step

from fuseplug import KernelManager
from fuseplug_backends.looked_up import looked_up
from fuseplug_gated_delta_rule.recognise import structure as of_delta_rules
from fuseplug_gated_delta_rule.recognise.adapters import DeltaRuleAdapter
from fuseplug_gated_delta_rule.reference import gated_delta_rule
from fuseplug_selective_scan.recognise import structure as of_scans
from fuseplug_selective_scan.recognise.adapters import ScanAdapter
from fuseplug_selective_scan.reference import selective_scan
from fuseplug_ssd.recognise import structure as of_chunk_scans
from fuseplug_ssd.recognise.adapters import ChunkScanAdapter
from fuseplug_ssd.reference import ssd as recurrence

five = pytest.mark.skipif(transformers.__version__ < "5", reason="there they are written out, or of the module")
pytestmark = pytest.mark.usefixtures("small_checks")


class Family(NamedTuple):
    """Models with one recurrence.

    Attributes:
        op: The op's name.
        whole: The function for many tokens.
        step: The function for a decoding step.
        formula: The reference, called as ``whole`` is.
        targets: Finds the targets in a class, as the recogniser does.
        files: The least number of transformers' files that have the recurrence.
    """

    op: str
    whole: str
    step: str
    formula: Callable[..., Any]
    targets: Callable[[type], Iterable[Any]]
    files: int


def both_of(structure: Any, whole: str) -> Callable[[type], Iterable[Any]]:
    return lambda cls: itertools.chain(looked_up(cls, getattr(structure, whole)), looked_up(cls, structure.steps))


FAMILIES = {
    "scan": Family(
        *("selective_scan", "mamba_selective_scan", "mamba_selective_state_update"),
        *(ScanAdapter().bind(selective_scan), both_of(of_scans, "scans"), 4),
    ),
    "chunk scan": Family(
        *("ssd", "mamba2_chunk_scan", "mamba2_selective_state_update"),
        *(ChunkScanAdapter().bind(recurrence), both_of(of_chunk_scans, "chunk_scans"), 6),
    ),
    "head": Family(
        *("gated_delta_rule", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
        *(DeltaRuleAdapter("head").bind(gated_delta_rule), of_delta_rules._targets, 5),
    ),
    "channel": Family(
        *("gated_delta_rule", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
        *(DeltaRuleAdapter("channel").bind(gated_delta_rule), of_delta_rules._targets, 3),
    ),
}

MODELS = {
    **{name: ("scan", *row) for name, row in scans.MODELS.items()},
    **{name: ("chunk scan", values, None, 1) for name, values in ssd.MODELS.items()},
    **{name: (variant, values, 1, 1) for name, (values, variant) in delta_rules.MODELS.items()},
}
"""The family, the arguments of the config, how many mixers there are if known, and how many calls each makes."""

QUICK = [
    *(("mamba", torch.bfloat16), ("mamba2", torch.float32), ("qwen3_5_text", torch.bfloat16)),
    ("kimi_linear", torch.float32),
]
"""One of each family."""


def fused_by(op):
    return KernelManager(environ={"FUSEPLUG_KERNELS": f"inductor_fused_{op}", "FUSEPLUG_EVERY_SIZE": "1"})


def continued(model, tokens):
    """The logits of *tokens* after the first twelve, which fill the cache without gradients."""
    with torch.no_grad():
        first = model(tokens[:, :12], use_cache=True)
    past = next(name for name in ("cache_params", "past_key_values") if name in first)
    return model(tokens[:, 12:], **{past: first[past]}).logits


def counts(applied, function):
    """How many calls the kernel and the original computed, the same in every mixer."""
    (count,) = {(count.fused, count.original) for count in applied.calls() if count.target.function == function}
    return count


def in_float64(model, family):
    """What a step of *model* gives in float64 with the formula in place of its own function; *model* stays in float64.

    The model's own function computes in float32, whatever its inputs, and may lose a digit or two in the gradients of
    decays.
    """
    module = importlib.import_module(type(model).__module__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, family.whole, family.formula)
        return step(model.double())


@five
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in QUICK else pytest.mark.thorough)
        for name, dtype in itertools.product(MODELS, ROUNDINGS)
    ],
)
def test_logits_and_gradients_are_as_near_to_the_truth_as_those_of_the_unfused_model(name, dtype):
    kind, values, number, _ = MODELS[name]
    family = FAMILIES[kind]
    model = build(name, dtype, **values)
    before = step(model)
    with fused_by(family.op).apply_all(model) as applied:
        assert not applied.report.left_alone, applied.report
        assert number in (None, sum(len(entry.paths) for entry in applied.report.fused) // 2), applied.report
        fused = step(model)
        assert counts(applied, family.whole)[0] > 0 == counts(applied, family.whole)[1]
    after = step(model)
    truth = in_float64(model, family)
    assert fused.keys() == before.keys()
    for key, unfused in before.items():
        assert (fused[key].dtype, fused[key].shape) == (unfused.dtype, unfused.shape)
        allowed = 2 * distance(unfused, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
        assert torch.equal(after[key], unfused)


@five
@pytest.mark.parametrize("name", quick_if(MODELS, ("mamba", "mamba2", "qwen3_5_text")))
def test_training_under_autocast_and_generation_are_computed_by_the_kernel(name):
    kind, values, _, calls = MODELS[name]
    family = FAMILIES[kind]
    model = build(name, torch.float32, **values).eval()
    tokens = torch.arange(48).view(2, 24) + 3

    def generated():
        return model.generate(tokens, max_new_tokens=4, do_sample=False)

    with torch.no_grad():
        before = generated(), continued(model, tokens)
    with fused_by(family.op).apply_all(model) as applied:
        model(tokens, labels=tokens, num_items_in_batch=torch.tensor(46)).loss.backward()
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens, labels=tokens).loss.backward()
        assert counts(applied, family.whole) == (2 * calls, 0)
        assert torch.equal(generated(), before[0])
        assert counts(applied, family.whole) == (3 * calls, 0)
        assert counts(applied, family.step) == (3 * calls, 0)
        with torch.no_grad():
            torch.testing.assert_close(continued(model, tokens), before[1], rtol=1e-4, atol=1e-5)
        assert counts(applied, family.whole) == (5 * calls, 0)


@five
@pytest.mark.parametrize("name", quick_if(ssd.MODELS, ("mamba2",)))
def test_states_that_are_written_into_before_the_backward_have_their_gradients(name):
    """A model writes the last states into its cache; transformers' chunk scan has kept a copy of the first states."""
    model = build(name, torch.float32, **ssd.MODELS[name])
    tokens = torch.arange(48).view(2, 24) + 3

    def gradients():
        continued(model, tokens).square().sum().backward()
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    before = gradients()
    with fused_by("ssd").apply_all(model, verify=False):
        torch.testing.assert_close(gradients(), before, rtol=1e-3, atol=1e-4)


@five
@pytest.mark.parametrize("name", quick_if(MODELS, ("mamba2",)))
def test_a_compiled_model_computes_what_the_unfused_one_does(name):
    """Guards compare what the functions close over, and the compiler traces both guards and functions."""
    kind, values, *_ = MODELS[name]
    model = build(name, torch.float32, **values).eval()
    tokens = torch.arange(48).view(2, 24) + 3
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
        with fused_by(FAMILIES[kind].op).apply_all(model, verify=False):
            compiled = torch.compile(model, backend="eager")(tokens, use_cache=False).logits
    torch.testing.assert_close(compiled, before, rtol=1e-4, atol=1e-5)


@five
@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_function_of_transformers_is_found(family):
    found = targets_beside(family.whole, family.targets)
    for folder, targets in found.items():
        assert {*targets} == {f"forward:{family.whole}", f"forward:{family.step}"}, folder
    assert len(found) >= family.files


@pytest.mark.skipif(transformers.__version__ >= "5", reason="there a function is looked up")
@pytest.mark.parametrize(("name", "what"), [("mamba", "selective scan"), ("mamba2", "chunk scan")])
def test_a_scan_that_is_written_out_is_left_alone_with_a_reason(name, what):
    kind, values, *_ = MODELS[name]
    report = fused_by(FAMILIES[kind].op).plan(build(name, torch.float32, **values)).report
    assert not report.fused
    assert report.left_alone
    assert all(f"its {what} is written out in its forward" in entry.why_not for entry in report.left_alone)
