"""rope kernels. Under construction."""
