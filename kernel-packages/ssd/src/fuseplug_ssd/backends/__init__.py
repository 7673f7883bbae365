"""How it is computed: a module for each backend, with the function that its kernel names."""
