"""Python imports this module when it starts, because ``fuseplug run`` put its folder first on ``PYTHONPATH``.

The module installs the finder that waits for imports, removes itself, and imports the ``sitecustomize`` that Python
would have found otherwise.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes milliseconds to import

try:
    import _fuseplug_on_import  # type: ignore[import-not-found]

    _fuseplug_on_import.start()
except Exception as error:  # noqa: BLE001 - no process may fail to start because of us
    sys.stderr.write(f"fuseplug run: nothing is fused in process {os.getpid()}: {type(error).__name__}: {error}\n")

sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]  # noqa: PTH100
sys.modules.pop("sitecustomize", None)
# If there is none, this raises the error that Python expects in that case.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
