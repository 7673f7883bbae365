"""What importing a kernel's module does to this process besides: undone where that can be done, and named."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from .hearing import heard
from .settings import Setting, of_fresh_torch, of_python, of_torch, undo

HEAVY = ("torch", "triton", "torch_npu", "transformers", "jax", "tensorflow")
"""What importing the module of a kernel's class must not import: `fuseplug list` would wait for it."""

SLOW = 0.5
"""Seconds from which on the import of a module is worth a word. Without torch it takes milliseconds."""

PATIENCE = 5.0
"""Seconds after which a user is told what they are waiting for. Nothing can stop an import but Ctrl-C."""


_A_MOMENT = 0.01
"""Seconds after which a setting that is still changing is taken to be changed by another thread."""


class Effect(NamedTuple):
    """Something that the import of a kernel did to the process.

    Attributes:
        what: What, in words.
        undone: Whether it was taken back. If not, it lasts as long as the process.
    """

    what: str
    undone: bool

    def __str__(self) -> str:
        return f"{self.what} ({'undone' if self.undone else 'cannot be undone'})"


@contextlib.contextmanager
def watched(module: str, whose: str) -> Iterator[list[Effect]]:
    """While *module* is imported, keep what is printed from the screen; afterwards undo what can be, and say all.

    Args:
        module: Its name.
        whose: For which kernel it is imported: said to the user if it takes long.

    Yields:
        A list that is filled when the block ends, however it ends.
    """
    found: list[Effect] = []
    if _is_there(module):
        yield found  # one module has several kernels, and a look takes milliseconds
        return
    notice = threading.Timer(PATIENCE, _tell, (module, whose))
    notice.daemon = True
    notice.start()
    before, start = _Look(), time.perf_counter()
    try:
        with heard() as text:
            yield found
    finally:
        notice.cancel()
        seconds = time.perf_counter() - start
        if printed := "".join(text).strip():
            found.append(Effect(prints(module, printed), undone=True))
        found += before.undo(module)
        if seconds > SLOW:
            found.append(Effect(f"importing {module} takes {seconds:.1f} s: do nothing on import", undone=False))


def _is_there(module: str) -> bool:
    """Whether *module* is imported, and looking a name up in it runs no code of its own."""
    there = sys.modules.get(module)
    return isinstance(there, types.ModuleType) and "__getattr__" not in vars(there)


def _tell(module: str, whose: str) -> None:
    told = f"fuseplug: still importing {module}, for kernel {whose}; Ctrl-C stops it, and says how to leave it out"
    with contextlib.suppress(Exception):  # nobody may be listening
        print(told, file=sys.stderr, flush=True)  # noqa: T201 - it is for a person who waits


def prints(module: str, text: str) -> str:
    """How it is said that *module* prints *text*."""
    return f"importing {module} prints {text[:80]!r}"


def heavy_since(before: Iterable[str] = ()) -> list[str]:
    """The heavy libraries that were imported, without those of *before*."""
    return [name for name in HEAVY if name in sys.modules and name not in before]


def imports_heavy(module: str, heavy: Iterable[str]) -> str:
    """How it is said that *module* imports what it must not."""
    return f"importing {module} imports {', '.join(heavy)}: import it in match() or later"


def changed(module: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """The settings that are otherwise, and how it is said that importing *module* changed each."""
    return {
        name: f"importing {module} changes {name} for the whole process"
        for name, value in before.items()
        if name in after and not name.startswith("os.environ") and after[name] != value
    }


def writes_variable(module: str, name: str) -> str:
    """How it is said that *module* writes an environment variable."""
    return f"importing {module} writes the environment variable {name}"


def starts_thread(module: str) -> str:
    """How it is said that *module* starts a thread."""
    return f"importing {module} starts a thread"


class Names:
    """What the public names of torch stand for."""

    def __init__(self, torch: types.ModuleType) -> None:
        self._torch, self._had_compiler = torch, _has_compiler(torch)
        owners = (torch, torch.nn, torch.nn.functional, torch.Tensor, torch.nn.Module)
        self._names = [(owner, dict(vars(owner))) for owner in owners]

    def undo(self, module: str) -> list[Effect]:
        """Give each name back what it stood for, and say which ones importing *module* replaced."""
        found = []
        compiler_came = _has_compiler(self._torch) != self._had_compiler
        for owner, names in self._names:
            now = dict(vars(owner))
            replaced = [name for name, value in names.items() if now.get(name, value) is not value]
            if compiler_came:  # it replaces names itself, by functions of torch
                replaced = [name for name in replaced if not _is_of_torch(now[name])]
            # In a class, a name that was inherited; modules get names as their parts are imported.
            added = [name for name in now if name not in names] if isinstance(owner, type) else []
            for name in (*replaced, *added):
                if not name.startswith("_"):
                    if name in names:
                        setattr(owner, name, names[name])
                    else:
                        delattr(owner, name)
                    found.append(Effect(f"importing {module} replaces {owner.__name__}.{name}", undone=True))
        return found


def _has_compiler(torch: types.ModuleType) -> bool:
    # Not by fuseplug.torch_private, which imports torch: here torch may be absent, and must stay so.
    return "_dynamo" in vars(torch)


def _is_of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", None)).partition(".")[0] == "torch"


class _Look:
    """The process before an import."""

    def __init__(self) -> None:
        self._heavy = heavy_since()
        self._settings = _settings()
        self._environ = dict(os.environ)
        self._threads = set(threading.enumerate())
        self._names = Names(torch) if (torch := _torch()) else None

    def undo(self, module: str) -> list[Effect]:
        found = []
        heavy = heavy_since(self._heavy)
        if heavy:
            found.append(Effect(imports_heavy(module, heavy), undone=False))
        for name in self._environ.keys() | os.environ.keys():
            if os.environ.get(name) != self._environ.get(name):
                _set_variable(name, self._environ.get(name))
                found.append(Effect(writes_variable(module, name), undone=True))
        # What such a library filters and replaces for itself is its own business.
        found += self._undo_settings(module, but=("warnings.filters",) if heavy else ())
        if self._names and not heavy:
            found += self._names.undo(module)  # now, for torch.Storage goes with the default dtype
        if set(threading.enumerate()) - self._threads:
            found.append(Effect(starts_thread(module), undone=False))
        return found

    def _undo_settings(self, module: str, but: tuple[Setting, ...]) -> list[Effect]:
        came = _torch() if "torch" not in self._heavy else None
        before = (of_fresh_torch(came) if came else {}) | self._settings
        different = changed(module, before, now := _settings())
        if different and len(self._threads) > 1:
            # Other threads draw random numbers, for one, and must not draw them again.
            time.sleep(_A_MOMENT)
            later = _settings()
            different = {name: what for name, what in different.items() if later.get(name) == now[name]}
        for name in different:
            if name not in but:
                with contextlib.suppress(Exception):  # what cannot be set is said to be as it was left
                    undo(name, before[name], _torch())
        after = _settings() if different else {}
        return [
            Effect(what, undone=after.get(name) == before[name]) for name, what in different.items() if name not in but
        ]


def _torch() -> types.ModuleType | None:
    return sys.modules.get("torch")


def _settings() -> dict[Setting, Any]:
    found = of_python()
    if torch := _torch():
        # Under somebody's tensor mode, or half imported, torch cannot be asked everything.
        with contextlib.suppress(Exception):
            found |= of_torch(torch, compilers=False)
    return found


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
