"""What the ops of torch_npu compute, in plain PyTorch on the CPU.

Arithmetic is in float32 (float64 for float64) and results are rounded once, as the documentation of the ops says or
leaves open. What a kernel of the NPU rounds in between is imitated where its source was read, and not known elsewhere.
What a kernel does not write is NaN, and a call that would read or write beyond a tensor raises.
"""

from .registry import reference, when_added
from .rows import references

__all__ = ["reference", "references", "when_added"]
