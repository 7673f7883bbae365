"""A user's settings, in the environment or in a file: ``fuseplug.toml``, or ``[tool.fuseplug]`` of a pyproject.toml.

The file is the nearest one in or above the working directory, and anybody may have written it. So it can only choose
among what is installed: it cannot say where passed checks are read from.
"""

from __future__ import annotations

import functools
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .errors import SettingsError

FILE = "fuseplug.toml"
TABLE = "tool.fuseplug"


def _words(value: Any) -> str | None:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return None
    return ",".join(words)


class Setting(NamedTuple):
    """One setting.

    Attributes:
        variable: Its environment variable.
        unset: What holds if it is not set.
        expected: What a file may say.
        read: Turns the value in a file into that of the variable, or into ``None`` if a file must not have it.
    """

    variable: str
    unset: str
    expected: str
    read: Callable[[Any], str | None] = _words


SETTINGS: Mapping[str, Setting] = {
    "kernels": Setting("FUSEPLUG_KERNELS", "every kernel is used", expected='a list of ids, such as ["-this_one"]'),
    "allow": Setting("FUSEPLUG_ALLOW", "every distribution is allowed", expected="a list of distributions"),
    "cache": Setting(
        "FUSEPLUG_CACHE",
        unset="the user's cache directory",
        expected='"off"; a directory has to be named by the variable',
        read=lambda value: value if value == "off" else None,
    ),
    "every_size": Setting(
        "FUSEPLUG_EVERY_SIZE",
        unset="calls that are too small to gain are the original's",
        expected="true or false",
        read=lambda value: str(int(value)) if isinstance(value, bool) else None,
    ),
}
"""The settings, by the name that a file uses."""


class File(NamedTuple):
    """The file with a user's settings.

    Attributes:
        path: Where it is.
        variables: The settings in it, under the names of the environment variables.
    """

    path: Path
    variables: Mapping[str, str]


class Environment(dict[str, str]):
    """The environment variables; for those that are not set, the settings of *file* under the same names."""

    def __init__(self, environ: Mapping[str, str], file: File | None) -> None:
        super().__init__({**(file.variables if file else {}), **environ})
        self._set_in_file = {name: file.path for name in file.variables if name not in environ} if file else {}

    def source(self, variable: str) -> Path | None:
        """The file that sets *variable*; ``None`` if the environment sets it, or nothing does."""
        return self._set_in_file.get(variable)


def environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """The variables and settings that are in force now, in this working directory.

    Raises:
        SettingsError: If the file is not valid.
    """
    return Environment(environ, nearest_file())


def named(environ: Mapping[str, str], variable: str) -> str:
    """Where a user changes *variable*: its own name, or the name of a setting and its file."""
    source = environ.source(variable) if isinstance(environ, Environment) else None
    if source is None:
        return variable
    return f"{next(name for name, setting in SETTINGS.items() if setting.variable == variable)} in {source}"


def nearest_file() -> File | None:
    """The file in the working directory, or in the nearest directory above that has one.

    Raises:
        SettingsError: If it is not valid.
    """
    try:
        here = Path.cwd()
    except OSError:  # the working directory was deleted
        return None
    for folder in (here, *here.parents):
        for path in (folder / FILE, folder / "pyproject.toml"):
            try:
                stat = path.stat()
                file = _file(path, stat.st_mtime_ns, stat.st_size)
            except OSError:  # the file does not exist or cannot be read
                continue
            if file is not None:
                return file
    return None


@functools.lru_cache(maxsize=32)
def _file(path: Path, *version: int) -> File | None:
    """The settings in *path*; ``None`` for a pyproject.toml without any. A new *version* makes the cache read again."""
    del version
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.name != FILE and TABLE not in text:
        return None
    table = _parsed(path, text)
    if path.name != FILE:
        table = table.get("tool", {}).get("fuseplug")
        if table is None:
            return None
    if not isinstance(table, dict):
        raise SettingsError(f"{path}: [{TABLE}] is {table!r}; expected a table with {', '.join(SETTINGS)}", path=path)
    return File(path, dict(_variables(path, table)))


def _parsed(path: Path, text: str) -> Any:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}: correct or remove it", path=path) from error


def _variables(path: Path, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in table.items():
        setting = SETTINGS.get(name)
        if setting is None:
            names = ", ".join(SETTINGS)
            raise SettingsError(f"{path}: there is no setting {name!r}; there are: {names}", path=path, setting=name)
        read = setting.read(value)
        if read is None:
            raise SettingsError(
                f"{path}: {name} is {value!r}; expected {setting.expected} ({setting.variable})",
                path=path,
                setting=name,
            )
        yield setting.variable, read
