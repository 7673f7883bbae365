"""The functions by which trainers' heads score tokens: what they compute, and kernels in their place.

TRL's trainers have put such a head on models since TRL 1.15. The head looks up an `autograd.Function`, which no kernel
of a model can replace: core replaces methods of classes, and functions that these methods look up. So
``fuseplug-tools`` finds the head and asks `offer`.
"""

from .offering import offer

__all__ = ["offer"]
