"""Changing a model and changing it back: instances only, all or none, recognised wherever it turns up."""

from ..rebind import calls, lookup, space_of
from .accepts import Accepts, Mark
from .applied import Applied, complain
from .journal import Change, Patch, put_on, strip, take_off
from .replacement import replacement, replacement_of
from .slots import class_method, describe, is_original, our_marks, our_parts

__all__ = [
    "Accepts",
    "Applied",
    "Change",
    "Mark",
    "Patch",
    "calls",
    "class_method",
    "complain",
    "describe",
    "is_original",
    "lookup",
    "our_marks",
    "our_parts",
    "put_on",
    "replacement",
    "replacement_of",
    "space_of",
    "strip",
    "take_off",
]
