"""The losses of transformers' language models are computed without logits, wherever nothing needs logits.

A sample of models is tested here; ``python -m survey.loss_heads`` tests all.
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
    "cohere/CohereForCausalLM",  # multiplies the logits
    "granite/GraniteForCausalLM",  # divides the logits
    "qwen3_moe/Qwen3MoeForCausalLM",
    "bart/BartForConditionalGeneration",  # adds a bias outside the head
    "llava/LlavaForConditionalGeneration",  # takes images, too
    "gpt2/GPT2LMHeadModel",  # ties the head to the embeddings
}
SETTLED = {"fused", "made real", "declined", "no head"}
NOT_TRIED = {"not built", "not run"}
SAMPLE = 32


def asked():
    """The models that every run tests, and a sample of the others, the same in all processes of one run."""
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
