"""What the ops of torch_npu compute, in plain PyTorch on the CPU.

Arithmetic is in float32 (float64 for float64) and results are rounded once, as the documentation of the ops says or
leaves open. What a kernel of the NPU rounds in between is not known here and not imitated.
"""

from .registry import reference, when_added
from .rows import references

__all__ = ["reference", "references", "when_added"]
