"""The ops that exist already, and what a new kernel of one inherits from its package."""

from __future__ import annotations

from typing import NamedTuple


class KnownOp(NamedTuple):
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


KNOWN_OPS = {
    "rmsnorm": KnownOp("fuseplug-rmsnorm", "RMSNormKernel", "rms_norm", variants=("llama", "cast-last")),
    "swiglu": KnownOp("fuseplug-swiglu", "SwiGLUKernel", "swiglu", variants=("silu", "silu gate-first")),
    "rope": KnownOp("fuseplug-rope", "RoPEKernel", "rope", variants=("half",)),
    "moe": KnownOp("fuseplug-moe", "MoEKernel", "moe", variants=("silu",)),
}

NOT_TEMPLATES = {
    "linear_cross_entropy": "its kernels are loops over chunks of tokens, which no small template shows: copy "
    "kernel-packages/linear-cross-entropy of the repository",
    "causal_conv1d": "its kernels are programs for two layouts, forward and backward: copy "
    "kernel-packages/causal-conv1d of the repository",
    "gated_delta_rule": "its kernels go from chunk to chunk of the tokens, forward and backward: copy "
    "kernel-packages/gated-delta-rule of the repository",
}
"""Ops that exist and have no template, with what to do instead."""
