"""What can go wrong: one base class, one child per stage of the walk.

Each exception says which object, what was expected, what was found and what to do next; callers that want to act on it
rather than print it find the objects as attributes.
"""

from __future__ import annotations

from typing import Any


class FuseplugError(Exception):
    """Base of everything Fuseplug raises on purpose. Keyword arguments become attributes."""

    def __init__(self, message: str, **objects: Any) -> None:
        super().__init__(message)
        self.__dict__.update(objects)


class SettingsError(FuseplugError):
    """A file with settings says something that cannot be set, or cannot be read as TOML."""


class DiscoveryError(FuseplugError):
    """A kernel was asked for by name and is not there, is broken, or is claimed by two distributions."""


class PlanError(FuseplugError):
    """The question itself is wrong: not a module, a glob that matches nothing, an unknown mode."""


class RejectedError(FuseplugError):
    """A kernel that was asked for by name, or ``strict=True``, met a site it had to leave alone."""


class VerificationError(RejectedError):
    """The same, because the kernel was run and its numbers are wrong here."""


class PatchError(FuseplugError):
    """A patch could not be put on; whatever was already on has been taken off again."""


class UndoError(FuseplugError):
    """Something of ours could not be taken off because it is no longer there; the rest was."""
