"""swiglu kernels. Under construction."""
