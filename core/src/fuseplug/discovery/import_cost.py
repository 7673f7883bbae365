"""What importing a plug-in costs. It should take milliseconds, and import none of the libraries that take seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator

HEAVY = ("torch", "triton", "torch_npu", "transformers", "jax", "tensorflow")
"""What importing the module of a kernel's class must not import: `fuseplug list` would wait for it."""

SLOW = 0.5
"""Seconds from which on the import of a module is worth a word. Without torch it takes milliseconds."""

PATIENCE = 5.0
"""Seconds after which a user is told what they are waiting for. Nothing can stop an import but Ctrl-C."""


@contextlib.contextmanager
def import_costs(module: str, whose: str) -> Iterator[list[str]]:
    """While *module* is imported, see what that costs.

    Args:
        module: Its name.
        whose: For which kernel it is imported: said to the user if it takes long.

    Yields:
        Sentences, filled when the block ends, however it ends; none if the import is light and quick.
    """
    costs: list[str] = []
    notice = threading.Timer(PATIENCE, _tell, (module, whose))
    notice.daemon = True
    notice.start()
    before, start = heavy_since(), time.perf_counter()
    try:
        yield costs
    finally:
        notice.cancel()
        seconds = time.perf_counter() - start
        if heavy := heavy_since(before):
            costs.append(imports_heavy(module, heavy))
        if seconds > SLOW:
            costs.append(f"importing {module} takes {seconds:.1f} s: do nothing on import")


def _tell(module: str, whose: str) -> None:
    told = f"fuseplug: still importing {module}, for kernel {whose}; Ctrl-C stops it, and says how to leave it out"
    with contextlib.suppress(Exception):  # nobody may be listening
        print(told, file=sys.stderr, flush=True)  # noqa: T201 - it is for a person who waits


def heavy_since(before: Iterable[str] = ()) -> list[str]:
    """The heavy libraries that were imported, without those of *before*."""
    return [name for name in HEAVY if name in sys.modules and name not in before]


def imports_heavy(module: str, heavy: Iterable[str]) -> str:
    """How it is said that *module* imports what it must not."""
    return f"importing {module} imports {', '.join(heavy)}: import it in match() or later"
