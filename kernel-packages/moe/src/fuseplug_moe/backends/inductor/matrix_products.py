"""Matrix products of groups of rows, by the function of torch that is fastest on the device.

On x86 processors with AVX-512 that Intel did not make, MKL computes float32 without AVX-512, and oneDNN with it. Times
of MKL and oneDNN on one core of such a machine, in µs: 64 rows times 512 × 2048 take 1934 and 890, their gradients 1758
and 1058, 1887 and 1224; 4 rows times 2048 × 1536 take 1624 and 864; 4 rows times 256 × 1024 take 152 and 105. For
smaller products, the two are alike.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from fuseplug_backends import products
from fuseplug_backends.inductor import has_onednn_linear, onednn_linear

_ROWS = 16
_ELEMENTS = 1 << 19
"""From `_ROWS` rows on, or from two rows on if the matrix has `_ELEMENTS` elements, oneDNN is faster."""

_MANY = 8
"""From this number of groups on, torch's own loop over them is faster than one in Python."""


def matmul(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Compute ``out = a @ b``, and record nothing for a backward."""
    if (
        a.dtype is torch.float32
        and a.device.type == "cpu"
        and (len(a) >= _ROWS or (len(a) > 1 and b.numel() >= _ELEMENTS))
        and onednn_is_faster()
    ):
        out.copy_(onednn_linear(a, b.t()))
    else:
        products.matmul(a, b, out)


def grouped_matmul(a: Tensor, b: Tensor, sizes: Sequence[int], groups: Sequence[int]) -> Tensor | None:
    """Multiply all groups in one call, where torch has a fast one.

    The product is ``(rows, in) @ (groups, in, out)``, or ``(rows, in)ᵀ @ (rows, out)`` for each group.

    Args:
        a: The rows, sorted by group; transposed, ``(in, rows)``, to sum over the rows.
        b: A matrix for each group, or rows, too.
        sizes: The number of rows of each of *groups*.
        groups: The groups that have rows.

    Returns:
        The products; ``None`` if multiplying group by group is faster.
    """
    if len(sizes) < _MANY or a.dtype not in (torch.float32, torch.bfloat16) or products.float32_is_faster(a, b):
        return None
    if a.dtype is torch.float32 and onednn_is_faster():
        rows = sum(sizes) / len(sizes)
        if rows >= _ROWS or (rows >= 2 and b[0].numel() >= _ELEMENTS):
            return None
    if not (at_once(a) and at_once(b)):
        return None
    number = b.shape[0] if b.dim() == 3 else groups[-1] + 1
    counts = [0] * number
    for group, size in zip(groups, sizes, strict=True):
        counts[group] = size
    return functional.grouped_mm(a, b, offs=torch.tensor(counts, device=a.device).cumsum(0, dtype=torch.int32))


def at_once(tensor: Tensor) -> bool:
    """Whether torch's grouped matmul takes *tensor*: it reads 16 bytes at a time, so rows must begin there."""
    return (
        hasattr(functional, "grouped_mm")
        and max(tensor.stride()[-2:]) * tensor.element_size() % 16 == 0
        and tensor.data_ptr() % 16 == 0
    )


@functools.cache
def onednn_is_faster() -> bool:
    """Whether this processor has AVX-512, but MKL does not use it."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not available:
        return False
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return "vendor_id" in described and "GenuineIntel" not in described and has_onednn_linear()
