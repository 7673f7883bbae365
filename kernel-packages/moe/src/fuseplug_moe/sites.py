"""Where a mixture of experts is found: by structure alone, leaving to behaviour what its experts compute."""

from __future__ import annotations

from fuseplug import Proposal, Rejection, Site

from . import blocks, stacked


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Say whether *site* holds experts, and how they may be called.

    Either their weights are stacked in two tensors of the module itself (`stacked`), or they are a list of modules
    among its children (`blocks`).
    """
    # Most of the modules of a model have neither.
    if len(site.module._parameters) > 1:
        return stacked.match(site.module)
    return blocks.match(site.module) if site.module._modules else None
