"""Small mixtures of experts as models write them, one for each form that a kernel here claims."""

from __future__ import annotations

import torch
from torch import nn

from . import flat_weights, listed_blocks, routed_blocks, stacked_experts

__all__ = ["specimens"]


def specimens() -> list[nn.Module]:
    """Modules that every kernel of this package fuses, odd sizes among them."""
    generator = torch.Generator().manual_seed(0)
    modules: list[nn.Module] = [
        stacked_experts.StackedExperts(4, 12, 7),
        stacked_experts.StackedExperts(1, 5, 3, nn.GELU("tanh")),
        stacked_experts.StackedExperts(5, 16, 9, nn.GELU(), sums="at-once"),
        stacked_experts.StackedExperts(4, 12, 7, nn.ReLU()),
        stacked_experts.TransposedExperts(4, 12, 7),
        stacked_experts.ClampedExperts(3, 12, 5),
        stacked_experts.ActivationClampedExperts(3, 12, 5),
        stacked_experts.InterleavedExperts(4, 10, 6),
        stacked_experts.DenselyWeightedExperts(4, 10, 6),
        stacked_experts.EveryExpertInEval(4, 10, 6),
        stacked_experts.UngatedExperts(4, 11, 7),
        stacked_experts.OwnGateExperts(4, 12, 6),
        stacked_experts.NormedExperts(4, 12, 7),
        listed_blocks.SparseBlock(5, 12, 7, top_k=2),
        listed_blocks.SparseBlock(6, 9, 5, top_k=3, renormalise=False, logits=False),
        listed_blocks.SparseBlock(4, 12, 7, top_k=2, shared=8, shared_gate=True),
        listed_blocks.SparseBlock(4, 12, 7, top_k=2, shared=8, all_experts=True),
        listed_blocks.ChosenFirst(5, 12, 7, top_k=2),
        listed_blocks.ChosenFirst(6, 9, 5, top_k=2, of_all=True),
        listed_blocks.RoutedBlock(5, 12, 7, top_k=2),
        routed_blocks.SortingBlock(5, 12, 7, top_k=2),
        routed_blocks.SortingBlock(6, 9, 5, top_k=3, bias=True, logits=False),
        routed_blocks.InputScalingBlock(4, 12, 7, top_k=1),
        routed_blocks.InputScalingBlock(5, 10, 6, top_k=2),
        flat_weights.FlatExperts(4, 12, 7),
        stacked_experts.PassingExperts(4, 12, 7, passing=2),
    ]
    for module in modules:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return modules
