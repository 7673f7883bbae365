"""The implementations: one module for each backend, with the function that its kernel names."""
