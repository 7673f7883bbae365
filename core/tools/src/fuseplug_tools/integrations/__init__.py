"""Fuseplug in other libraries, a module for each. Outside of them, only ``fuseplug run`` imports one: `heads`."""
