"""Trust in this CPU's vector instructions, until a program cannot be built.

Before its first program, Inductor would build and load a small one for each set of vector instructions, up to six. The
first program shows just as well whether the instructions work.
"""

from __future__ import annotations

import threading

from ..torch_private.inductor import forget_vectors, trust_vectors

_trusted = threading.Event()
_doubted = threading.Event()


def trust(device_type: str) -> None:
    """Have Inductor skip its check, for a program on *device_type*."""
    if device_type == "cpu" and not _doubted.is_set() and trust_vectors():
        _trusted.set()


def doubt() -> bool:
    """Have Inductor check from now on; return whether it skipped its check until now."""
    if _doubted.is_set() or not _trusted.is_set():
        return False
    _doubted.set()
    forget_vectors()
    return True
