"""Where a mixture of experts is found: by structure alone, leaving to behaviour what its experts compute."""

from __future__ import annotations

from torch import nn

from fuseplug import Proposal, Rejection, Site

from . import flat_weights, listed_blocks, routed_blocks, stacked_experts
from .gates import says_how_many


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Say whether *site* holds experts, and how they may be called.

    Their weights are stacked in two tensors of the module itself (`stacked_experts`) or of its children
    (`routed_blocks`), lie below each other in a child (`flat_weights`), or are those of a list of modules among its
    children (`listed_blocks`).
    """
    # Most of the modules of a model have neither.
    module = site.module
    if not module._parameters and (why := stacked_experts.flattened(module)):
        return why
    if len(module._parameters) > 1:
        return stacked_experts.match(module) or flat_weights.match(module)
    if not module._modules:
        return _one_projection(module)
    return listed_blocks.match(module) or routed_blocks.match(module) or flat_weights.match(module)


def _one_projection(module: nn.Module) -> Rejection | None:
    """An answer for one projection of all experts: stacked, as many as the module says it has."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dim() == 3 and says_how_many(module, len(parameter)):
            return Rejection("it is one projection of all experts; what is fused is the module around it")
    return None
