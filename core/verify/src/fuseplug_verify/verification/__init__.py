"""Decides whether a kernel may replace a module's code: by what both compute, never by their names."""
