"""The gated delta rule on CPUs: in chunks, by operations of PyTorch. Nothing is compiled."""

from __future__ import annotations

from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain_floating

from .. import reference
from ..reference import Variant
from .chunked import in_chunks
from .segment import Form, Segment


def compute(
    variant: Variant,
    normalised: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`fuseplug_gated_delta_rule.reference.gated_delta_rule` in chunks: the same arguments, result and errors.

    Matmuls are in float32, under autocast too. The reference computes calls inside ``torch.compile``, ``torch.export``
    and other tracers, and calls in which the logarithm of a channel's decay is above 0.
    """
    tensors = (q, k, v, g, beta, initial_state)
    # A decay above 1 may overflow on one side of a block's first row although the product of both sides does not.
    if not plain_floating(*tensors) or (variant.per_channel and bool((g > 0).any())):
        return by_reference(reference.compute, variant, normalised, *tensors)
    return _in_chunks(Form(variant, normalised), *tensors)


gated_delta_rule = computed_by(compute, reference.gated_delta_rule)

_in_chunks = in_chunks(Segment)
