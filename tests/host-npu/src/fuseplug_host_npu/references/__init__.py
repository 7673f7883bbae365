"""What the ops of torch_npu compute, in plain PyTorch on the CPU.

Arithmetic is in float32 (float64 for float64) and results are rounded once, as the documentation of the ops says or
leaves open. References imitate the intermediate roundings of an NPU's kernel where its source was read; elsewhere these
roundings are unknown. Elements that a kernel does not write are NaN, and a call that would read or write beyond a
tensor raises.
"""

from .registry import reference, when_added
from .rows import references

__all__ = ["reference", "references", "when_added"]
