"""Runs commands as a shell would, also under ``fuseplug run``."""

import subprocess
import sys


def completed(*args, env):
    """The end of the command *args*: what it printed, and its exit status."""
    # It waits for all processes that hold the pipes: one that the command left behind would hold them, too.
    return subprocess.run([*map(str, args)], capture_output=True, text=True, env=env, timeout=300)


def fuseplug_run(*args, env):
    """The same of ``fuseplug run *args``."""
    return completed(sys.executable, "-m", "fuseplug", "run", *args, env=env)


def torchrun(*args):
    """A command that starts the script *args* in two processes."""
    options = ("--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    return (sys.executable, "-m", "torch.distributed.run", *options, *args)
