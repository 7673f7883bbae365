"""A mixture of experts in Triton, for GPUs."""

from .mixture import moe

__all__ = ["moe"]
