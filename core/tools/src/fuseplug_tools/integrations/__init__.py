"""Fuseplug in other libraries. Each module is for one of them, and nothing else of core imports it."""
