"""Small kernels, right ones and ones with every kind of fault, laid out like a distribution's package."""
