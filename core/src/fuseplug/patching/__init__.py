"""Changes a model and undoes the changes: on instances only, all or none, and also on copies of the model."""

from .applied import Applied, complain
from .journal import Change, Patch, put_on, strip, take_off
from .making import patch_around, patch_of
from .mark import Mark
from .replacement import replacement, replacement_of
from .slots import class_method, our_marks, our_replacements
from .subjects import subject_of

__all__ = [
    "Applied",
    "Change",
    "Mark",
    "Patch",
    "class_method",
    "complain",
    "our_marks",
    "our_replacements",
    "patch_around",
    "patch_of",
    "put_on",
    "replacement",
    "replacement_of",
    "strip",
    "subject_of",
    "take_off",
]
