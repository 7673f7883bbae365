"""A fused kernel for layer_norm: see `kernels`. Importing this package imports no torch."""
