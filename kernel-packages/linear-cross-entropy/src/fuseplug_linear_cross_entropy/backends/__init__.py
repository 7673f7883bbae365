"""How it is computed: a module for each backend, with the functions `linear_cross_entropy` and `linear_logprob`."""
