"""The reference of the mixture of experts, against a loop over tokens."""

import pytest
import torch
from support.mixtures import arguments, assert_close, run
from torch.nn import functional

from fuseplug_moe import reference


def token_by_token(x, top_k_index, top_k_weights, gate_up, down):
    """The definition, in the fewest words."""
    rows = []
    for token, experts, weights in zip(x, top_k_index, top_k_weights, strict=True):
        row = torch.zeros_like(token)
        for expert, weight in zip(experts.tolist(), weights, strict=True):
            if expert < len(gate_up):
                gate, up = (gate_up[expert] @ token).chunk(2)
                row = row + weight * (down[expert] @ (functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("elsewhere", [0, 3], ids=["all here", "some elsewhere"])
def test_is_the_weighted_sum_of_the_experts_of_each_token(elsewhere):
    named = arguments()
    named["top_k_index"].view(-1)[:elsewhere] = 5
    assert_close(run(reference.moe, named), run(token_by_token, named), 2e-5)


def test_where_all_experts_are_elsewhere_it_is_zero():
    named = arguments()
    named["top_k_index"].fill_(5)
    y, *gradients = run(reference.moe, named)
    assert not y.any()
    assert not any(gradient.any() for gradient in gradients if gradient is not None)


def test_an_expert_elsewhere_adds_nothing_even_with_an_infinite_weight():
    named = arguments()
    named["top_k_index"][2, 0] = 5
    plain = reference.moe(**named)
    named["top_k_weights"] = named["top_k_weights"].detach().clone()
    named["top_k_weights"][2, 0] = float("inf")
    assert torch.equal(reference.moe(**named), plain)


@pytest.mark.parametrize("name", reference.GATES)
def test_every_gate_of_the_table_is_another_function(name):
    rows = torch.linspace(-9, 9, 64).view(4, 16)
    values = {other: reference.apply_gate(rows, None, other, "concatenated", 2.0, 1.702) for other in reference.GATES}
    assert not [other for other in values if other != name and torch.allclose(values[other], values[name], atol=1e-5)]


def test_a_negative_index_is_an_expert_elsewhere_where_the_host_does_not_look():
    named = arguments()
    index = named["top_k_index"]
    elsewhere = reference.moe(**named | {"top_k_index": index.masked_fill(index == 1, len(named["down"]))})
    assert torch.equal(reference.moe(**named | {"top_k_index": index.masked_fill(index == 1, -1)}), elsewhere)
    assert not torch.equal(reference.moe(**named), elsewhere)
