"""Replaces a function that a method looks up as a global of its Python module, in one copy of the method only.

A method like ``LlamaAttention.forward`` calls ``apply_rotary_pos_emb``, a global of its Python module. Setting that
global would affect every model in the process. So the one instance gets a copy of the method that uses another *name*:
an alias in the same globals, which no other code uses. The globals themselves are never copied: Dynamo guards globals
by module and name, and silently confuses two sets of globals of one module.

An alias lives as long as the code that uses it, and a replacement lives as long as its alias. So a replacement that
refers to the very module that it serves keeps this module in memory until the patch is taken off.
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
    """A function cannot be replaced in one copy of a method only."""


_Key: TypeAlias = frozenset[tuple[str, int]]

_serial = itertools.count(1)
_copies: weakref.WeakKeyDictionary[types.FunctionType, weakref.WeakValueDictionary[_Key, types.FunctionType]] = (
    weakref.WeakKeyDictionary()
)
# Re-entrant, because building a copy can start a garbage collection, and with it any object's __del__.
_lock = ProcessLock()


def calls(method: Callable[..., Any], name: str) -> bool:
    """Return whether *method*, or a function that it wraps, looks *name* up as a global.

    Wrapped functions are found through closures, not through ``__wrapped__``, which says where a function comes from,
    not what it calls. The answer is False for anything but a Python function or method.
    """
    return any(_uses(code, name) & _READS for function in _reached(method) for code in all_codes(function.__code__))


def called_functions(
    method: Callable[..., Any], like: Callable[[Any], bool] = inspect.isfunction
) -> dict[str, Callable[..., Any]]:
    """Return what *method*, or a function that it wraps, looks up as globals and may call, by name.

    Each name has its present value.

    Args:
        method: A function, or a method of a class; for anything else, the result is empty.
        like: Says which values count; by default, plain Python functions. It is called before any code is read, so
            that many methods can be searched quickly.
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
    """Return the globals in which *method*, or a function that it wraps, looks *name* up.

    Raises:
        RebindError: If *name* is not looked up, if the Python module has no such global, or if a copy with another name
            in its place could differ from *method* in more than that.
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
    """Return a copy of *method*, and of what it wraps, that calls the *replacements* in place of the named globals.

    While the copy is in use, the same arguments give the same copy, so that ``torch.compile`` compiles one function
    however many instances are patched. Nothing here keeps the copy alive; hold it to patch, undo and patch again
    without another compilation.

    Args:
        method: The function of the class, which stays as it is.
        replacements: The functions to find instead, by the name that is looked up.

    Raises:
        RebindError: If a name is not looked up, or if the copy could differ from *method* in more than was asked for.
    """
    # Ids stand for the replacements: while the copy lives, its aliases hold the replacements, and no id is reused.
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
    """Return why a copy of *code* with another name in place of *name* could go wrong; ``None`` if it could not."""
    uses = _uses(code, name)
    others = ", ".join(sorted(uses - _READS))
    if any(global_name.startswith(_ALIAS) for global_name in code.co_names):
        return "belongs to a copy that was made here before"
    if others and uses & (_READS | _GLOBAL_WRITES):
        # The code has one entry for both uses.
        return f"also uses that name in another way ({others})"
    if uses & _READS and (inner or code.co_flags & _RESUMABLE):
        return "may run when the copy is gone: it is a generator, or a function in a function"
    return None


def _copy(function: types.FunctionType, replacements: Mapping[str, Callable[..., Any]]) -> types.FunctionType:
    """Return a copy of *function*, and of the functions that it wraps, as far as these look one of the names up."""
    code, space = function.__code__, function.__globals__
    aliases = {name: f"{_ALIAS}{name}_{next(_serial)}" for name in replacements if _looks_up(function, name)}
    space |= {alias: replacements[name] for name, alias in aliases.items()}
    copies = {
        inner: _copy(inner, replacements)
        for _, inner in _cells(function)
        if inner is not None and any(calls(inner, name) for name in replacements)
    }
    # Only cells that hold a copied function are new. Any other cell is state that the function may share.
    closure = tuple(types.CellType(copies[inner]) if inner in copies else cell for cell, inner in _cells(function))
    code = code.replace(co_names=tuple(aliases.get(name, name) for name in code.co_names))
    copy = types.FunctionType(code, space, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    functools.update_wrapper(copy, function, updated=())  # it knows which metadata this version of Python has
    del copy.__wrapped__  # type: ignore[attr-defined]  # the copy does not wrap *function*, but what that wraps
    # Not __wrapped__ alone: Dynamo's decorators keep what they wrap under names of their own.
    for key, value in vars(function).items():
        vars(copy)[key] = copies.get(value, value) if isinstance(value, types.FunctionType) else value
    for alias in aliases.values():
        # The finalizer takes no lock: it may run inside any allocation, and no alias is ever used twice.
        weakref.finalize(copy, space.pop, alias, None).atexit = False  # a thread may still be calling the copy then
    return copy


def _reached(method: Callable[..., Any]) -> list[types.FunctionType]:
    """Return the Python functions that make up *method*: itself, and all that closures hold."""
    start = method.__func__ if isinstance(method, types.MethodType) else method
    reached = [start] if isinstance(start, types.FunctionType) else []
    for function in reached:  # the list grows meanwhile; a closure may hold its own function
        reached += dict.fromkeys(inner for _, inner in _cells(function) if inner is not None and inner not in reached)
    return reached


def _cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, types.FunctionType | None]]:
    """Yield the cells of the closure, each with the Python function that it holds, if it holds one."""
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
    """Return the opcodes that use *name*: a global, an attribute and an import share one entry in ``co_names``."""
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
