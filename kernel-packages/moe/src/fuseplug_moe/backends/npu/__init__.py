"""A mixture of experts in operations of torch_npu, for Ascend NPUs.

Six launches carry a forward, beside a few over ``(tokens, k)`` elements: rows are counted and gathered in the order of
the experts, multiplied by all experts in one grouped matmul, gated, multiplied again, put back and weighed. The host
waits for nothing: how many rows an expert has stays on the device.
"""

from __future__ import annotations

from .gmm import GmmFunction, HybridGmmFunction
from .mixture import moe

__all__ = ["GmmFunction", "HybridGmmFunction", "moe"]
