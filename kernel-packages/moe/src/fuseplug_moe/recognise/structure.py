"""Finds mixtures of experts by structure alone: what the experts compute is left to their behaviour."""

from __future__ import annotations

from torch import nn

from fuseplug import Proposal, Rejection, Site

from . import flat_weights, listed_blocks, routed_blocks, stacked_experts
from .gates import numbers_of_experts


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Say whether *site* holds experts, and how they may be called.

    The weights of the experts are stacked in two tensors of the module itself (`stacked_experts`) or of its children
    (`routed_blocks`), lie one below the other in a child (`flat_weights`), or belong to a list of modules among its
    children (`listed_blocks`).
    """
    # Most modules of a model have neither several parameters nor children.
    module = site.module
    if not module._parameters and (why := stacked_experts.flattened(module)):
        return why
    if len(module._parameters) > 1:
        return stacked_experts.match(module) or flat_weights.match(module)
    if not module._modules:
        return _one_projection(module)
    return listed_blocks.match(module) or routed_blocks.match(module) or flat_weights.match(module)


def _one_projection(module: nn.Module) -> Rejection | None:
    """An answer for one stacked projection of all experts, as many as the module says it has."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dim() == 3 and len(parameter) in numbers_of_experts(module):
            return Rejection("it is one projection of all experts; Fuseplug fuses the module around it")
    return None
