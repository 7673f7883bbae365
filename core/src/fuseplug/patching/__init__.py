"""Changes a model and undoes the changes: on instances only, all or none, and also on copies of the model."""

from .hooked import describe
from .in_use import InUse
from .journal import Change, Patch, patches_on, put_on, strip, take_off
from .making import patch_around, patch_of
from .mark import Mark
from .replacement import mark_of, replacement, replacement_of
from .slots import class_method, computes_past, our_marks, our_replacements
from .subjects import subject_of

__all__ = [
    "Change",
    "InUse",
    "Mark",
    "Patch",
    "class_method",
    "computes_past",
    "describe",
    "mark_of",
    "our_marks",
    "our_replacements",
    "patch_around",
    "patch_of",
    "patches_on",
    "put_on",
    "replacement",
    "replacement_of",
    "strip",
    "subject_of",
    "take_off",
]
