"""Runs ``fuseplug`` with Triton's interpreter, changed so that it can run Liger-Kernel's programs.

python tests/catalogue/liger_interpreted.py check liger_fused_rmsnorm --quick
"""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    from benchmarks.gpu.interpreting import let_peers_in

    let_peers_in()
    runpy.run_module("fuseplug", run_name="__main__")
