"""A model as a list of places: what each module is, where it is, and what kernels see of it."""
