"""What kernels of one backend share."""
