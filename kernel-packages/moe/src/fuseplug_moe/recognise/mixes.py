"""The combinations of dtypes in which experts are checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from fuseplug_backends.dtypes import MODEL_DTYPES


class ExpertsMix(NamedTuple):
    """One combination to check.

    Attributes:
        x: The dtype of the rows.
        experts: The dtype of the experts' weights.
        router: The dtype of the routing weights, and of the router's own weights if the site has the router.
        elsewhere: Whether some rows go to an expert elsewhere, the number after the last: with expert parallelism, one
            of another rank.
    """

    x: torch.dtype
    experts: torch.dtype
    router: torch.dtype
    elsewhere: bool = False


def mixes(dtype: torch.dtype) -> Iterator[ExpertsMix]:
    """All combinations, first those of *dtype*, the module's.

    Routers give float32 or the dtype of the rows. With experts in float32, autocast puts the routing weights in half
    precision, or the routing weights and the rows.
    """
    for narrow in sorted(MODEL_DTYPES, key=lambda other: other is not dtype):
        yield ExpertsMix(narrow, narrow, narrow)
        if narrow is not torch.float32:
            yield ExpertsMix(narrow, narrow, torch.float32)
            yield ExpertsMix(narrow, torch.float32, narrow)
            yield ExpertsMix(torch.float32, torch.float32, narrow)


def mixes_of_modules(dtype: torch.dtype) -> Iterator[ExpertsMix]:
    """The combinations for experts that are linear layers, which take only rows of their own dtype."""
    return (mix for mix in mixes(dtype) if mix.experts is mix.x)
