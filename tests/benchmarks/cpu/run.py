"""Checks and times every kernel against the best of its peers on this CPU. Writes docs/results.

python tests/benchmarks/cpu/run.py [--only FILE …] [--dtype float32] [--long] [--repeats N]
python tests/benchmarks/cpu/run.py --dry-run    # checks the benchmark itself, and writes no times
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.cpu.command import main

    main()
