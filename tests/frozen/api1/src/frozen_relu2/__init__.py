"""Kernels for Fuseplug's API 1."""
