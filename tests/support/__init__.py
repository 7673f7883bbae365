"""Small real kernels and models that the tests share."""
