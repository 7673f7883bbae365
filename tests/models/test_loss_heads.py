"""The language models of transformers: their losses are computed without logits, wherever nothing needs those.

Some of them: ``python -m survey.loss_heads`` asks all.
"""

import os
import random

import pytest
from support.managers import manager_of
from support.thorough import quick_if
from survey.loss_heads import check, classes

QUICK = {
    "llama/LlamaForCausalLM",
    "gemma2/Gemma2ForCausalLM",  # caps the logits
    "cohere/CohereForCausalLM",  # multiplies them
    "granite/GraniteForCausalLM",  # divides them
    "qwen3_moe/Qwen3MoeForCausalLM",
    "bart/BartForConditionalGeneration",  # adds a bias that is no part of the head
    "llava/LlavaForConditionalGeneration",  # sees
    "gpt2/GPT2LMHeadModel",  # ties the head to the embeddings
}
SETTLED = {"fused", "made real", "declined", "no head"}
NOT_TRIED = {"not built", "not run"}
SAMPLE = 32


def asked():
    """Those that each run asks, and a few others; the same ones for all processes of one run."""
    names = sorted(map(str, classes()))
    chance = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID"))
    chosen = QUICK | {*chance.sample(names, SAMPLE)}
    return [pytest.param(name, id=name) for name in names if name in chosen]


@pytest.mark.parametrize("each", quick_if(asked(), QUICK))
def test_the_loss_and_its_gradients_are_those_of_the_unfused_model(kernel, each):
    record = check(manager_of(kernel), next(found for found in classes() if str(found) == each))
    if record["status"] in NOT_TRIED and each not in QUICK:
        pytest.skip(f"{record['status']}: {record['why']}")
    assert record["status"] in ({"fused"} if each in QUICK else SETTLED), record
