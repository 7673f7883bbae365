"""A mixture of experts in operations of torch_npu, for Ascend NPUs.

A forward takes six launches, beside a few over ``(tokens, k)`` elements: count the rows, gather them in the order of
the experts, multiply those of all experts in one grouped matmul, gate, multiply again, put the rows back and weigh
them. The host never waits: the number of rows of an expert stays on the device.
"""

from __future__ import annotations

from .gmm import GmmFunction, HybridGmmFunction
from .mixture import moe

__all__ = ["GmmFunction", "HybridGmmFunction", "moe"]
