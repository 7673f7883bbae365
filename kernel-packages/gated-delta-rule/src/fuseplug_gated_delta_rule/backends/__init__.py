"""The backends: a module for each, with the function that its kernel names."""
