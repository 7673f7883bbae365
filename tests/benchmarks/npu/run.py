"""Checks every kernel for NPUs on this NPU, then times it against its peers. Writes npu.json and npu.txt, to be sent.

python tests/benchmarks/npu/run.py [--only OP …] [--quick] [--folder FOLDER]
python -m fuseplug_host_npu tests/benchmarks/npu/run.py --dry-run    # checks the benchmark itself, and writes no times
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["FUSEPLUG_EVERY_SIZE"] = "1"  # so that the kernel is timed at every size, never the original
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.npu.command import main

    sys.exit(main())
