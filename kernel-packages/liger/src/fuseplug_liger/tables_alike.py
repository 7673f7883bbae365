"""Examples of RoPE that Liger computes: it reads one half of the tables, and in the op's examples the halves differ."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fuseplug import Example, Proposal, Rejection, Site
from fuseplug_rope.recognise import match as rotary_functions
from fuseplug_rope.recognise.adapters import MethodAdapter


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Propose what `fuseplug_rope` proposes, also to be checked on tables of which Liger may read one half."""
    answer = rotary_functions(site)
    if answer is None or isinstance(answer, Rejection):
        return answer
    return [also_with_tables_alike(proposal) for proposal in answer]


def also_with_tables_alike(proposal: Proposal) -> Proposal:
    """*proposal*, also checked on tables with two equal halves: Liger computes with no others."""
    adapter = proposal.adapters[0]
    roles = getattr(adapter.function if isinstance(adapter, MethodAdapter) else adapter, "roles", None)
    if roles is None or roles.cos is None or roles.sin is None:
        return proposal
    likely = proposal.likely
    run = proposal.mixes if likely is None else (proposal.mixes[0], *likely)
    alike = [_Alike(mix) for mix in run]
    return replace(
        proposal,
        mixes=(*proposal.mixes, *alike),
        likely=None if likely is None else (*likely, *alike),
        example=functools.partial(_example, proposal.example, (roles.cos, roles.sin)),
    )


class _Alike(NamedTuple):
    """A mix whose tables have two equal halves."""

    mix: Any


def _example(
    make: Callable[..., Example], tables: tuple[int, ...], mix: Any, size: int, generator: torch.Generator
) -> Example:
    if not isinstance(mix, _Alike):
        return make(mix, size, generator)
    example = make(mix.mix, size, generator)
    arguments = list(example.args)
    for at in tables:
        half = arguments[at][..., : arguments[at].shape[-1] // 2]
        arguments[at] = torch.cat((half, half), -1)
    return replace(example, args=tuple(arguments))
