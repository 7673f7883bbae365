"""Replace a function that a method looks up as a global of its module, for those who call one copy of the method.

A method like ``LlamaAttention.forward`` calls ``apply_rotary_pos_emb``, a global of its module. Setting that global
would reach every model in the process, so the one instance gets a copy of the method in which the *name* is another
one: an alias, put in the same globals, that nobody else says. The globals themselves are never copied: Dynamo guards
globals by module and name, and confuses a module's two sets of globals without a word.

An alias lives as long as the code that says it, and the replacement lives as long as its alias: a replacement that
holds the very module it is for keeps it in memory until the patch is taken off.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

from .process_lock import ProcessLock
from .remembered import remembered

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_ALIAS = "_fuseplug_rebound_"
_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GLOBAL_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})


class RebindError(Exception):
    """A function cannot be replaced for one copy of a method only."""


_Key: TypeAlias = frozenset[tuple[str, int]]

_serial = itertools.count(1)
_copies: weakref.WeakKeyDictionary[types.FunctionType, weakref.WeakValueDictionary[_Key, types.FunctionType]] = (
    weakref.WeakKeyDictionary()
)
# Re-entrant, since building a copy can set off a garbage collection, and with it anybody's __del__.
_lock = ProcessLock()


def calls(method: Callable[..., Any], name: str) -> bool:
    """Say whether *method*, or a function it wraps, looks *name* up as a global.

    What it wraps is found through closures, not through ``__wrapped__``: that says where a function comes from, not
    what it calls. False for what is no Python function or method.
    """
    return any(_uses(code, name) & _READS for function in _reached(method) for code in all_codes(function.__code__))


def called_functions(
    method: Callable[..., Any], like: Callable[[Any], bool] = inspect.isfunction
) -> dict[str, Callable[..., Any]]:
    """Return what *method*, or a function it wraps, looks up as globals and may call, by name.

    What each name means is what it means now.

    Args:
        method: A function, or a method of a class; for what is neither there is nothing to be seen.
        like: Which values count; plain Python functions if not said. It is asked before any code is read, so that
            many methods can be looked through.
    """
    called = {}
    for function in _reached(method):
        for code in all_codes(function.__code__):
            values = {name: function.__globals__.get(name) for name in code.co_names}
            for name, value in values.items():
                if callable(value) and like(value) and _uses(code, name) & _READS:
                    called[name] = value
    return called


def space_of(method: Callable[..., Any], name: str) -> dict[str, Any]:
    """The globals in which *method*, or the function it wraps that looks *name* up, finds it.

    Raises:
        RebindError: Nobody looks *name* up, the module has no such global, or a copy with another word for it could
            differ from *method* in more than that.
    """
    users = [function for function in _reached(method) if _looks_up(function, name)]
    for function in _reached(method):
        for code in all_codes(function.__code__):
            if why := _obstacle(code, name, inner=code is not function.__code__):
                raise _refusal(method, name, f"{code.co_name} ({code.co_filename}:{code.co_firstlineno}) {why}")
        if any(function in _reached(inner) for _, inner in _cells(function) if inner is not None):
            raise _refusal(method, name, f"{_label(function)} holds itself in a closure")
    if not users:
        raise _refusal(method, name, "that name is not looked up as a global")
    if len({id(user.__globals__) for user in users}) > 1:
        raise _refusal(method, name, f"{' and '.join(map(_label, users))} look it up in different modules")
    space = users[0].__globals__
    if name not in space:
        raise _refusal(method, name, f"{space.get('__name__')} has no global of that name")
    return space


def rebound(method: types.FunctionType, replacements: Mapping[str, Callable[..., Any]]) -> types.FunctionType:
    """Return a copy of *method*, and of what it wraps, that calls the *replacements* where it said their names.

    While anybody uses the copy, the same question gets the same copy, so that ``torch.compile`` compiles one function
    however many instances are patched. Nothing here keeps the copy alive; hold it to patch, undo and patch again
    without another compilation.

    Args:
        method: The function that the class has; it stays as it is.
        replacements: What it is to find instead, by the name that it looks up.

    Raises:
        RebindError: A name is not looked up, or the copy could differ from *method* in more than what was asked for.
    """
    # As good as the replacements themselves: while the copy lives its aliases hold them, and no id is given away.
    key = frozenset((name, id(replacement)) for name, replacement in replacements.items())
    with _lock:
        if not isinstance(method, types.FunctionType):
            raise _refusal(method, ", ".join(replacements), f"it is a {type(method).__name__}, not a Python function")
        copies = _copies.setdefault(method, weakref.WeakValueDictionary())
        copy = copies.get(key)
        if copy is None:
            for name in replacements:
                space_of(method, name)
            copy = copies[key] = _copy(method, replacements)
        return copy


def _obstacle(code: types.CodeType, name: str, *, inner: bool) -> str | None:
    """What *code* is or does, if anything, that a copy of it with another word for *name* would do wrong."""
    uses = _uses(code, name)
    others = ", ".join(sorted(uses - _READS))
    if any(global_name.startswith(_ALIAS) for global_name in code.co_names):
        return "belongs to a copy that was made here before"
    if others and uses & (_READS | _GLOBAL_WRITES):
        # Its code has one entry for both.
        return f"also uses that name otherwise ({others})"
    if uses & _READS and (inner or code.co_flags & _RESUMABLE):
        return "may run when the copy is gone: it is a generator, or a function in a function"
    return None


def _copy(function: types.FunctionType, replacements: Mapping[str, Callable[..., Any]]) -> types.FunctionType:
    """A copy of *function*, and of what it wraps, as far as that looks one of the names up."""
    code, space = function.__code__, function.__globals__
    aliases = {name: f"{_ALIAS}{name}_{next(_serial)}" for name in replacements if _looks_up(function, name)}
    space |= {alias: replacements[name] for name, alias in aliases.items()}
    copies = {
        inner: _copy(inner, replacements)
        for _, inner in _cells(function)
        if inner is not None and any(calls(inner, name) for name in replacements)
    }
    # Only cells that hold what is copied are new ones; any other is state that the function may share.
    closure = tuple(types.CellType(copies[inner]) if inner in copies else cell for cell, inner in _cells(function))
    code = code.replace(co_names=tuple(aliases.get(name, name) for name in code.co_names))
    copy = types.FunctionType(code, space, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    functools.update_wrapper(copy, function, updated=())  # knows what metadata this version of Python has
    del copy.__wrapped__  # type: ignore[attr-defined]  # it is no wrapper: it wraps what *function* wraps
    # Not __wrapped__ alone: Dynamo's decorators note what they wrap under names of their own.
    for key, value in vars(function).items():
        vars(copy)[key] = copies.get(value, value) if isinstance(value, types.FunctionType) else value
    for alias in aliases.values():
        # No lock is taken here: this may run inside any allocation, and no alias is ever used twice.
        weakref.finalize(copy, space.pop, alias, None).atexit = False  # a thread may still be calling it
    return copy


def _reached(method: Callable[..., Any]) -> list[types.FunctionType]:
    """Return the Python functions that *method* is made of: itself, and all that closures hold."""
    start = method.__func__ if isinstance(method, types.MethodType) else method
    reached = [start] if isinstance(start, types.FunctionType) else []
    for function in reached:  # grows on the way; a closure may well hold the function it belongs to
        reached += dict.fromkeys(inner for _, inner in _cells(function) if inner is not None and inner not in reached)
    return reached


def _cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, types.FunctionType | None]]:
    """Yield the cells of a closure, each with the Python function it holds, if it holds one."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:  # not filled yet
            content = None
        yield cell, content if isinstance(content, types.FunctionType) else None


def _looks_up(function: types.FunctionType, name: str) -> bool:
    return bool(_uses(function.__code__, name) & _READS)


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield *code* and the code of every function, lambda, comprehension and class in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from all_codes(constant)


def _uses(code: types.CodeType, name: str) -> set[str]:
    """Return the opcodes that say *name*: a global, an attribute and an import share one entry in ``co_names``."""
    return _opcodes(code).get(name, set()) if name in code.co_names else set()


@remembered
def _opcodes(code: types.CodeType) -> dict[str, set[str]]:
    opcodes: dict[str, set[str]] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            opcodes.setdefault(instruction.argval, set()).add(instruction.opname)
    return opcodes


def _refusal(method: Any, name: str, why: str) -> RebindError:
    return RebindError(f"cannot replace {name!r} in {_label(method)}: {why}. Replace the whole method instead.")


def _label(method: Any) -> str:
    return f"{method.__module__}.{method.__qualname__}" if _reached(method) else repr(method)
