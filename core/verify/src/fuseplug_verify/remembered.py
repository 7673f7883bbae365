"""Caches what was found out about a function, as long as the function lives. It imports no torch."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def remembered(find: Callable[[Any], Found]) -> Callable[[Any], Found]:
    """Cache the answers of *find* for each function, or for its code: equal code has equal answers.

    Pass ``cls.forward``, not ``cls``: then no class is kept alive, and a new ``cls.forward`` has a new answer. The
    answer must not refer to the function, or the function would never be freed.

    Args:
        find: Answers for one function or other callable. The answer is not cached if there can be no weak reference to
            the callable.
    """
    answers: weakref.WeakKeyDictionary[Any, Found] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def remembering(function: Any) -> Found:
        try:
            has_answer = function in answers
        except TypeError:  # it has no hash, or no place for weak references
            return find(function)
        if not has_answer:
            answers[function] = find(function)
        return answers[function]

    return remembering
