"""RoPE in Triton, on GPUs: one launch for q and k, forward and backward, in any layout."""

from .rotation import rope

__all__ = ["rope"]
