"""Write what every template of ``fuseplug new`` becomes into a folder, for the linters."""

from __future__ import annotations

import sys
from pathlib import Path

from fuseplug_tools.new.asked import BACKENDS, asked
from fuseplug_tools.new.known import KNOWN
from fuseplug_tools.new.writing import write

for backend in BACKENDS:
    for number, params in enumerate(("", "weight", "weight,bias,eps=1e-5", "eps=1.5")):
        name = f"new{number}-{backend}"
        write(asked(name, op="", backend=backend, params=params), Path(sys.argv[1], f"{backend}-{number}"))
    for op in KNOWN:
        write(asked(f"my-{op}-{backend}", op=op, backend=backend, params=""), Path(sys.argv[1], f"{backend}-{op}"))
