"""Code that the kernels of one backend share."""
