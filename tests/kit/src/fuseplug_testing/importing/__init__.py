"""Finds out what importing a kernel does to a process, in a fresh Python."""
