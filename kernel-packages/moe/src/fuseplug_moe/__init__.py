"""moe kernels. Under construction."""
