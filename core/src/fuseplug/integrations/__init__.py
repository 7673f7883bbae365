"""Fuseplug in the libraries that train models. Each module needs its library, and nothing else of core imports it."""
