"""Checks and times every kernel against the best of its peers on this GPU. Writes docs/results/gpu.*.

python tests/benchmarks/gpu/run.py [--minutes 9] [--only PART …] [--quick]
TRITON_INTERPRET=1 python tests/benchmarks/gpu/run.py --device cpu --shapes tiny    # checks the benchmark itself
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.gpu.command import main

    sys.exit(main())
