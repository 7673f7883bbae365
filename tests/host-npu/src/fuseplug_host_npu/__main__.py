"""Run a script, unchanged, with an NPU in host memory: ``python -m fuseplug_host_npu [-m] script [argument …]``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from .errors import HostNPUUnavailable
from .loading import load


def main() -> None:
    """Load the stand-in before the script imports torch, and run it inside `HostNPU`."""
    parser = argparse.ArgumentParser(prog="python -m fuseplug_host_npu", description=__doc__)
    parser.add_argument("-m", dest="module", action="store_true", help="what to run is a module, not a file")
    parser.add_argument("--no-contract", action="store_true", help="let calls break documented limits")
    parser.add_argument("script", help="what to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it finds in sys.argv")
    given = parser.parse_args()
    try:
        load()
    except HostNPUUnavailable as error:
        parser.exit(1, f"{error}\n")
    from .host import HostNPU

    sys.argv = [given.script, *given.arguments]
    with HostNPU(contract=not given.no_contract):
        if given.module:
            runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(given.script).resolve().parent)  # as Python itself does
            runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    main()
