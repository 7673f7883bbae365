"""The pages of models on NPUs say what the published records say."""

import json

import pytest
import transformers
from packaging.version import Version

from . import npu_page
from .loss_heads import classes
from .npu_families import FAMILIES, PATCHES, Family

CONTENT = json.loads((npu_page.DOCS / "coverage.json").read_text())["releases"][npu_page.RELEASE]
ENGLISH = npu_page.PAGES[0]


@pytest.mark.parametrize(("path", "text"), [*npu_page.pages()], ids=[words.path for words in npu_page.PAGES])
def test_a_page_is_what_the_script_writes(path, text):
    assert path.read_text() == text, "PYTHONPATH=tests python -m survey.npu_page"


def test_every_framework_names_types_that_transformers_has():
    known = {record["model_type"] for record in CONTENT["records"] if "model_type" in record}
    assert {name for patches in PATCHES for name in patches.model_types} <= known


@pytest.mark.skipif(
    Version(transformers.__version__) < Version(npu_page.RELEASE), reason="the page is about a newer release"
)
def test_every_class_is_one_whose_loss_was_tried():
    assert {family.model_class for family in FAMILIES} <= {each.name for each in classes()}


def page_of(monkeypatch, *families, losses=None):
    monkeypatch.setattr(npu_page, "FAMILIES", families)
    return npu_page.to_markdown(ENGLISH, CONTENT, losses or {})


def test_what_is_left_alone_is_no_tick_and_has_a_reason(monkeypatch):
    page = page_of(monkeypatch, Family("Hy4", "hy_v4", "HYV4ForCausalLM"))
    assert "| Hy4 | `hy_v4` | in part: llama | ✓ silu |" in page
    assert "| Hy4 | `HYV4UnweightedRMSNorm` | computes none of the known variants" in page


def test_a_loss_that_is_not_fused_has_its_status(monkeypatch):
    losses = npu_page.losses_not_fused((npu_page.DOCS / "losses.md").read_text())
    assert losses["MusicgenForCausalLM"] == "declined"
    assert "RecurrentGemmaForCausalLM" not in losses
    page = page_of(monkeypatch, Family("x", "qwen3", "MusicgenForCausalLM"), losses=losses)
    assert "| – | declined |" in page


@pytest.mark.parametrize("model_type", ["step3p7", "sam3"])
def test_a_family_of_which_the_kernels_for_npus_fuse_less_is_refused(monkeypatch, model_type):
    with pytest.raises(ValueError, match=f"^{model_type}: .* leave the family out"):
        page_of(monkeypatch, Family("x", model_type, "x"))
