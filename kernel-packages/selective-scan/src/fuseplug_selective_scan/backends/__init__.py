"""One module for each backend, with the function that the backend's kernel names."""
