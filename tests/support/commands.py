"""Runs commands as a shell would, also under ``fuseplug run``."""

import subprocess
import sys


def completed(*args, env):
    """Run the command *args* to its end; return what it printed and its exit status."""
    # This waits for all processes that hold the pipes, including any that the command left behind.
    return subprocess.run([*map(str, args)], capture_output=True, text=True, env=env, timeout=300)


def fuseplug_run(*args, env):
    """Run ``fuseplug run *args`` to its end, as `completed` does."""
    return completed(sys.executable, "-m", "fuseplug", "run", *args, env=env)


def torchrun(*args):
    """A command that starts the script *args* in two processes."""
    options = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return (sys.executable, "-m", "torch.distributed.run", *options, *args)
