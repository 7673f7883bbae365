"""What importing a kernel does to a process besides giving the kernel."""
