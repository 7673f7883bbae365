"""That this CPU's vector instructions work is taken on trust, until a program cannot be built.

Inductor would build and load a small program for each set of them before its first, up to six. That first one shows the
same.
"""

from __future__ import annotations

import threading

from ..torch_private.inductor import forget_vectors, trust_vectors

_trusted = threading.Event()
_doubted = threading.Event()


def trust(device_type: str) -> None:
    """Have Inductor leave out its check, for a program on *device_type*."""
    if device_type == "cpu" and not _doubted.is_set() and trust_vectors():
        _trusted.set()


def doubt() -> bool:
    """Have Inductor check from now on; whether it did not until now."""
    if _doubted.is_set() or not _trusted.is_set():
        return False
    _doubted.set()
    forget_vectors()
    return True
