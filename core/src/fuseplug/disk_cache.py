"""Keeps, between runs, answers found on this machine that hold until something that they depend on changes.

Each answer is a JSON file in the user's cache directory, under the hash of everything that the answer depends on. An
answer that cannot be read counts as absent; one that cannot be written is found again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "FUSEPLUG_CACHE"
"""The environment variable that names the directory; ``off`` keeps nothing."""


def folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The directory in which answers are kept; ``None`` if they are not kept.

    Raises:
        SettingsError: If *environ* is not given, and the user's file is not valid.
    """
    if environ is None:
        from .configuration import environment

        environ = environment()
    named = environ.get(VARIABLE, "").strip()
    if named.lower() == "off":
        return None
    home = environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME") or "~/.cache"
    # Not Path.expanduser, which raises if there is no home directory.
    folder = os.path.expanduser(named or os.path.join(home, "fuseplug"))  # noqa: PTH111, PTH118
    return None if folder.startswith("~") else Path(folder)


class DiskCache:
    """Answers of one kind.

    Args:
        kind: The name of the folder with these answers.
        where: The directory with the folders of all kinds; ``None`` keeps nothing.
    """

    def __init__(self, kind: str, where: Path | None) -> None:
        self._folder = None if where is None else where / kind

    def __bool__(self) -> bool:
        """Whether answers are kept at all, even if there are none yet."""
        return self._folder is not None

    def get(self, key: str) -> Any:
        """The answer that is kept under *key*; ``None`` if there is none."""
        if self._folder is None:
            return None
        try:
            return json.loads((self._folder / f"{key}.json").read_text())
        except (OSError, ValueError, RecursionError):
            return None

    def put(self, key: str, answer: Any) -> None:
        """Keep *answer*, plain data, under *key*."""
        if self._folder is None:
            return
        # Write a part and rename it, so that the file is whole even if another process writes it now.
        part = self._folder / f"{key}.{os.getpid()}.part"
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(answer))
            part.replace(self._folder / f"{key}.json")

    def __len__(self) -> int:
        return 0 if self._folder is None else sum(1 for _ in self._folder.glob("*.json"))

    def clear(self) -> int:
        """Delete all answers, and return how many there were."""
        count = len(self)
        if self._folder is not None:
            for path in (*self._folder.glob("*.json"), *self._folder.glob("*.part")):
                path.unlink(missing_ok=True)
        return count


NOWHERE = DiskCache("", None)
"""A cache that keeps nothing."""
