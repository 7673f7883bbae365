"""The exceptions: one base class, and one subclass for each stage.

Each message names the object and says what was expected, what was found and what to do next. Callers that want to act
on an exception, rather than print it, find the objects as its attributes.
"""

from __future__ import annotations

from typing import Any


class FuseplugError(Exception):
    """Base of all exceptions that Fuseplug raises on purpose. Keyword arguments become attributes."""

    def __init__(self, message: str, **objects: Any) -> None:
        super().__init__(message)
        self.__dict__.update(objects)


class SettingsError(FuseplugError):
    """A file with settings contains something that cannot be set, or is not valid TOML."""


class DiscoveryError(FuseplugError):
    """A kernel that was asked for by name is not there, is broken, or is claimed by two distributions."""


class PlanError(FuseplugError):
    """The request itself is wrong: the model is no module, a glob matches nothing, the mode is unknown."""


class RejectedError(FuseplugError):
    """A site had to be left alone, although a kernel was asked for by name or ``strict=True`` was given."""


class VerificationError(RejectedError):
    """A site had to be left alone because a kernel was run and its numbers are wrong here."""


class PatchError(FuseplugError):
    """A patch could not be put on; all patches that were already on have been taken off again."""


class UndoError(FuseplugError):
    """Some replacements could not be taken off because they are no longer in place; all others were taken off."""
