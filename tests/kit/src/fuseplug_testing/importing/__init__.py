"""What importing a kernel does to a process, looked at in a Python of its own."""
