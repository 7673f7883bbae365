"""Functions by which heads that trainers put on models score tokens: what they compute, and kernels in their place.

TRL's trainers have such a head since TRL 1.15. What it looks up is an `autograd.Function`, which no kernel of a model
can replace: core replaces methods of classes, and what these look up. So ``fuseplug-tools`` finds the head and asks
`offer`.
"""

from .offering import offer

__all__ = ["offer"]
