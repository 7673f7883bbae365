"""The implementations: a module for each backend, with the function that its kernel names."""
