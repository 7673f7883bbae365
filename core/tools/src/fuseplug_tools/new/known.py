"""The ops that exist already, and what a new kernel of one inherits from its package."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """An op of a distribution of Fuseplug's own.

    Attributes:
        distribution: That of the op.
        base: The class in its ``kernels.py`` that recognises the op.
        function: What a backend computes, a name in its ``reference.py``.
        variants: Those that the kernel of a template computes.
    """

    distribution: str
    base: str
    function: str
    variants: tuple[str, ...]


KNOWN = {
    "rmsnorm": Known("fuseplug-rmsnorm", "RMSNormKernel", "rms_norm", ("llama", "cast-last")),
    "swiglu": Known("fuseplug-swiglu", "SwiGLUKernel", "swiglu", ("silu", "silu gate-first")),
    "rope": Known("fuseplug-rope", "RoPEKernel", "rope", ("half",)),
    "moe": Known("fuseplug-moe", "MoEKernel", "moe", ("silu",)),
}

NOT_TEMPLATES = {
    "linear_cross_entropy": "its kernels are loops over chunks of tokens, which no small template shows: copy "
    "kernel-packages/linear-cross-entropy of the repository"
}
"""Ops that exist and have no template, with what to do instead."""
