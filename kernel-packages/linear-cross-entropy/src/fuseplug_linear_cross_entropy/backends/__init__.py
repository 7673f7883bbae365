"""The backends: a module for each, with the functions `linear_cross_entropy` and `linear_logprob`."""
