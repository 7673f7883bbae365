"""Caches what was found out about a function, as long as the function lives. Importing it does not import torch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def remembered(find: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Cache the answer of *find* for each function or code object; equal code objects share an answer.

    Pass ``cls.forward``, not ``cls``: then no class is kept alive, and a new ``cls.forward`` gets a new answer. The
    answer must not refer to the function, or the function would never be freed.

    Args:
        find: Returns the answer for one function or other callable. The answer is not cached if the callable cannot be
            hashed or weakly referenced.
    """
    answers: weakref.WeakKeyDictionary[Any, Found] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def remembering(function: Any) -> Found:
        try:
            has_answer = function in answers
        except TypeError:  # it cannot be hashed or weakly referenced
            return find(function)
        if not has_answer:
            answers[function] = find(function)
        return answers[function]

    return remembering
