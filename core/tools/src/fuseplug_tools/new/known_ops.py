"""The ops that exist already, and what a new kernel for one of them inherits from the op's package."""

from __future__ import annotations

from typing import NamedTuple


class KnownOp(NamedTuple):
    """An op of one of Fuseplug's own distributions.

    Attributes:
        distribution: The distribution of the op.
        base: The class in its ``kernels.py`` that recognises the op.
        function: The function in its ``reference.py`` that a backend computes.
        variants: The variants that the kernel of a template computes.
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
    op: f"its kernels {what}: copy kernel-packages/{op.replace('_', '-')} of the repository"
    for op, what in {
        "linear_cross_entropy": "are loops over chunks of tokens, which no small template shows",
        "causal_conv1d": "are programs for two layouts, forward and backward",
        **dict.fromkeys(("gated_delta_rule", "selective_scan", "ssd"), "go from chunk to chunk, forward and back"),
    }.items()
}
"""The ops that exist already and have no template, each with what to do instead."""
