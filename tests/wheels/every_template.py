"""Write distributions from every template of ``fuseplug new`` into a folder, for the linters."""

import sys
from pathlib import Path

from fuseplug_tools.new.known_ops import KNOWN_OPS
from fuseplug_tools.new.request import BACKENDS, request_of
from fuseplug_tools.new.writing import write

for backend in BACKENDS:
    for number, params in enumerate(("", "weight", "weight,bias,eps=1e-5", "eps=1.5")):
        name = f"new{number}-{backend}"
        write(request_of(name, op="", backend=backend, params=params), Path(sys.argv[1], f"{backend}-{number}"))
    for op in KNOWN_OPS:
        write(request_of(f"my-{op}-{backend}", op=op, backend=backend, params=""), Path(sys.argv[1], f"{backend}-{op}"))
