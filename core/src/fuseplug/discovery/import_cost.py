"""What importing a plug-in costs. An import should take milliseconds, and load no library that takes seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterable, Iterator

HEAVY = ("torch", "triton", "torch_npu", "transformers", "jax", "tensorflow")
"""Libraries that the module of a kernel's class must not import, because `fuseplug list` would wait for them."""

SLOW = 0.5
"""An import that takes more seconds than this is reported. Without torch, an import takes milliseconds."""

PATIENCE = 5.0
"""Seconds after which a user is told which import they are waiting for. Only Ctrl-C can stop an import."""


@contextlib.contextmanager
def import_costs(module: str, whose: str) -> Iterator[list[str]]:
    """Measure what the import of *module*, within the block, costs.

    Args:
        module: The name of the module.
        whose: The kernel for which the module is imported. The user is told if the import takes long.

    Yields:
        A list that gets its sentences when the block ends, however it ends; none if the import is light and quick.
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
    with contextlib.suppress(Exception):  # stderr may be closed
        print(told, file=sys.stderr, flush=True)  # noqa: T201 - it is for a person who waits


def heavy_since(before: Iterable[str] = ()) -> list[str]:
    """The heavy libraries that are imported, without those in *before*."""
    return [name for name in HEAVY if name in sys.modules and name not in before]


def imports_heavy(module: str, heavy: Iterable[str]) -> str:
    """The sentence that says that *module* imports *heavy* libraries."""
    return f"importing {module} imports {', '.join(heavy)}: import it in match() or later"
