"""The recurrence of Mamba-2 on CPUs, in chunks, by operations of PyTorch. Nothing is compiled."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fuseplug.fallback import by_reference
from fuseplug_backends.functional import computed_by
from fuseplug_backends.inductor import plain_floating

from .. import reference
from ..reference import Step
from .chunked import in_chunks
from .segment import Segment


def compute(step: Step, *tensors: Any) -> tuple[Tensor, Tensor]:
    """`fuseplug_ssd.reference.ssd` in chunks: the same arguments, results and errors.

    Matmuls are in float32, even under autocast. Under ``torch.compile``, ``torch.export`` and other tracers, it calls
    the reference.
    """
    if not plain_floating(*tensors):
        return by_reference(reference.compute, step, *tensors)
    return _in_chunks(step, *tensors)


ssd = computed_by(compute, reference.ssd)

_in_chunks = in_chunks(Segment)
