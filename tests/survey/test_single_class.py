"""A class by itself is compared as whole models are, so a wrong kernel must show there too."""

from __future__ import annotations

import pytest
import transformers
from support.thorough import thorough
from torch import nn

from fuseplug import KernelManager

from .census import Census
from .single_class import Called, Class, check, classes

MANAGER = KernelManager(environ={})


@thorough
@pytest.mark.parametrize(
    ("each", "variant"),
    [
        (Class("swiglu", "phi3", "Phi3MLP"), "silu"),
        (Class("rmsnorm", "gemma", "GemmaRMSNorm"), "gemma"),
        (Class("moe", "gpt_oss", "GptOssExperts"), "swish-clamp-before-offset"),
    ],
)
def test_a_class_is_built_fused_and_compared(each: Class, variant: str) -> None:
    record = check(MANAGER, each)
    assert record["status"] == "checked", record
    assert [site["variant"].split()[0] for site in record["sites"]] == [variant]


@thorough
def test_a_caller_of_a_rotary_function_is_planned() -> None:
    record = check(MANAGER, Class("rope", "llama", "LlamaAttention"))
    assert (record["status"], record["sites"][0]["target"]) == ("planned", "forward:apply_rotary_pos_emb")


@thorough
def test_what_is_fused_in_a_class_around_it_says_so() -> None:
    record = check(MANAGER, Class("moe", "jetmoe", "JetMoeParallelExperts"))
    assert record["status"] == "checked", record
    assert ("JetMoeParallelExperts", True) in [(site["class"], site["fused"]) for site in record["sites"]]


def test_what_its_inputs_are_has_gradients_too() -> None:
    called = Called(nn.Linear(64, 3))
    called.give_inputs()
    assert [name for name, _ in called.named_parameters()] == ["input", "module.weight", "module.bias"]


def test_every_class_of_the_census_is_listed_once() -> None:
    census = Census.of(transformers.__version__)
    listed = classes(census)
    assert (
        len(listed)
        == len(set(listed))
        == len(census.calls) + sum(len(each) for op, each in census.classes.items() if op != "rope")
    )
