"""What was found out about a function, kept as long as the function lives."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def remembered(find: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Have *find* asked once about each function.

    Ask about ``cls.forward``, not about ``cls``: then no class is kept alive, and ``cls.forward = …`` is asked about
    anew. What is found must not refer to the function, or it would never be freed.

    Args:
        find: Answers for one function, or for anything else that can be called. An answer is not remembered where no
            weak reference to what is called is possible.
    """
    answers: weakref.WeakKeyDictionary[Any, Found] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def asked(function: Any) -> Found:
        try:
            known = function in answers
        except TypeError:  # it has no hash, or no place for weak references
            return find(function)
        if not known:
            answers[function] = find(function)
        return answers[function]

    return asked
