"""Small kernels, right and wrong in every way that kernels are, as a package of their own would hold them."""
