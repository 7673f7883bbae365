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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_ALIAS = "_fuseplug_rebound_"
_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_RESUMABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_GLOBAL_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})


class RebindError(Exception):
    """A function cannot be replaced for one copy of a method only.

    Attributes:
        method: The method.
        name: By which it looks the function up.
    """

    def __init__(self, message: str, method: Any, name: str) -> None:
        super().__init__(message)
        self.method = method
        self.name = name


_Key: TypeAlias = frozenset[tuple[str, int]]

_serial = itertools.count(1)
_copies: weakref.WeakKeyDictionary[types.FunctionType, weakref.WeakValueDictionary[_Key, types.FunctionType]] = (
    weakref.WeakKeyDictionary()
)
# Weak, since an alias lives as long as the code that says it. Equal code says equal things.
_said: weakref.WeakKeyDictionary[types.CodeType, dict[str, frozenset[str]]] = weakref.WeakKeyDictionary()
# Re-entrant, since building a copy can set off a garbage collection, and with it anybody's __del__.
_lock = ProcessLock()


def calls(method: Callable[..., Any], name: str) -> bool:
    """Say whether *method*, or a function it wraps, looks *name* up as a global.

    Functions nested in its code count. What it wraps is found through closures, not through ``__wrapped__``: that says
    where a function comes from, not what it calls. False for what is no Python function or method.
    """
    return any(_looks_up(function, name) for function in _reached(method))


def called_functions(
    method: Callable[..., Any], like: Callable[[Any], bool] = inspect.isfunction
) -> dict[str, Callable[..., Any]]:
    """Return what *method*, or a function it wraps, looks up as globals and may call, by name.

    What each name means is what it means now; where a method and what that wraps disagree, `lookup` says so later.

    Args:
        method: A function, or a method of a class; for what is neither there is nothing to be seen.
        like: Which values count; plain Python functions if not said. It is asked before any code is read, so that
            many methods can be looked through.
    """
    found = {}
    for function in _reached(method):
        for code in _codes(function.__code__):
            values = {name: function.__globals__.get(name) for name in code.co_names}
            for name, value in values.items():
                if callable(value) and like(value) and _uses(code, name) & _READS:
                    found[name] = value
    return found


def lookup(method: Callable[..., Any], name: str) -> Any:
    """Return what *method*, or the function it wraps that looks *name* up, finds now.

    Raises:
        RebindError: Nobody looks *name* up, the module has no such global, or it means different things in *method* and
            in what that wraps, which may come from different modules.
    """
    users = [function for function in _reached(method) if _looks_up(function, name)]
    if not users:
        raise _refusal(method, name, _what_it_looks_up(method), "Name one of these, or replace the whole method.")
    for user in users:
        if name not in user.__globals__:
            found = f"it is looked up, but {_home(user)} has no global of that name"
            raise _refusal(method, name, found, "Import or define it first; a builtin cannot be replaced this way.")
    first, *others = users
    for other in others:
        if other.__globals__[name] is not first.__globals__[name]:
            meanings = " and ".join(f"{user.__globals__[name]!r} in {_home(user)}" for user in (first, other))
            raise _refusal(method, name, f"it means {meanings}")
    return first.__globals__[name]


def space_of(method: Callable[..., Any], name: str) -> dict[str, Any]:
    """The globals in which *method*, or the function it wraps that looks *name* up, finds it.

    Raises:
        RebindError: As `lookup`.
    """
    lookup(method, name)
    return next(function.__globals__ for function in _reached(method) if _looks_up(function, name))


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
        known = _copies.get(method) if isinstance(method, types.FunctionType) else None
        copy = known.get(key) if known is not None else None
        if copy is None:
            _check(method, replacements)
            copy = _copy(method, replacements)
            _copies.setdefault(method, weakref.WeakValueDictionary())[key] = copy
        return copy


def _check(method: types.FunctionType, names: Iterable[str]) -> None:
    if not isinstance(method, types.FunctionType):
        found = f"it is a {type(method).__name__}, not a Python function"
        raise _refusal(method, ", ".join(names), found, "Give the plain function that the class has.")
    for name in names:
        lookup(method, name)
        for code in (code for function in _reached(method) for code in _codes(function.__code__)):
            if any(said.startswith(_ALIAS) for said in code.co_names):
                remedy = "Give the original method, and all its replacements at once."
                raise _refusal(method, name, f"{_label(code)} belongs to a copy that was made here before", remedy)
            if found := _obstacle(code, name):
                raise _refusal(method, name, found)


def _obstacle(code: types.CodeType, name: str) -> str | None:
    """What *code* does, if anything, that a copy of it with another word for *name* would do wrong."""
    uses = _uses(code, name)
    others = ", ".join(sorted(uses - _READS))
    if uses & _GLOBAL_WRITES:
        return f"{_label(code)} changes that global itself ({others})"
    if uses & _READS and others:
        return f"{_label(code)} also uses that name otherwise ({others}), and its code has one entry for both"
    return None


def _copy(method: types.FunctionType, replacements: Mapping[str, Callable[..., Any]]) -> types.FunctionType:
    affected = _affected(method, replacements)
    # Only cells that hold what is copied are new ones; any other is state that the function may share.
    cells = {id(cell): types.CellType() for function in affected for cell, held in _cells(function) if held in affected}
    copies = {function: _copy_one(function, replacements, cells) for function in affected}
    for function, copy in copies.items():
        for cell, held in _cells(function):
            if held in copies:
                cells[id(cell)].cell_contents = copies[held]
        # Not __wrapped__ alone: Dynamo's decorators note what they wrap under names of their own.
        for key, value in vars(function).items():
            vars(copy)[key] = copies.get(value, value) if isinstance(value, types.FunctionType) else value
    return copies[method]


def _copy_one(
    function: types.FunctionType, replacements: Mapping[str, Callable[..., Any]], cells: Mapping[int, types.CellType]
) -> types.FunctionType:
    code, aliases = _recoded(function.__code__, replacements, function.__globals__)
    closure = tuple(cells.get(id(cell), cell) for cell in function.__closure__ or ())
    copy = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    functools.update_wrapper(copy, function, updated=())  # knows what metadata this version of Python has
    del copy.__wrapped__  # type: ignore[attr-defined]  # it is no wrapper: it wraps what *function* wraps
    # Before Python 3.11 the frame of a generator keeps its code alive, but not its function.
    _forget_with(code if code.co_flags & _RESUMABLE else copy, aliases, function.__globals__)
    return copy


def _recoded(
    code: types.CodeType, replacements: Mapping[str, Callable[..., Any]], namespace: dict[str, Any]
) -> tuple[types.CodeType, list[str]]:
    """Return *code* with an alias for each name that it looks up itself, and these aliases."""
    aliases = {name: f"{_ALIAS}{name}_{next(_serial)}" for name in replacements if _uses(code, name) & _READS}
    for name, alias in aliases.items():
        namespace[alias] = replacements[name]
    constants = []
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and any(_reads(constant, name) for name in replacements):
            constant, nested = _recoded(constant, replacements, namespace)
            # A function made by the method may outlive it (a hook, a checkpoint), and takes only its code along.
            _forget_with(constant, nested, namespace)
        constants.append(constant)
    names = tuple(aliases.get(name, name) for name in code.co_names)
    return code.replace(co_names=names, co_consts=tuple(constants)), list(aliases.values())


def _forget_with(user: types.FunctionType | types.CodeType, aliases: Iterable[str], namespace: dict[str, Any]) -> None:
    for alias in aliases:
        # No lock is taken here: this may run inside any allocation, and no alias is ever used twice.
        finalizer = weakref.finalize(user, namespace.pop, alias, None)
        finalizer.atexit = False  # a thread may still be calling it


def _affected(method: types.FunctionType, names: Iterable[str]) -> dict[types.FunctionType, None]:
    """Which functions must be copied: those that look a name up, and those that reach one of these."""
    names = tuple(names)
    reached = _reached(method)
    affected = dict.fromkeys(f for f in reached if f is method or any(_looks_up(f, name) for name in names))
    while wrappers := [f for f in reached if f not in affected and any(held in affected for _, held in _cells(f))]:
        affected.update(dict.fromkeys(wrappers))
    return affected


def _reached(method: Callable[..., Any]) -> list[types.FunctionType]:
    """Return the Python functions that *method* is made of: itself, and all that closures hold."""
    start = method.__func__ if isinstance(method, types.MethodType) else method
    reached = [start] if isinstance(start, types.FunctionType) else []
    for function in reached:  # grows on the way; a closure may well hold the function it belongs to
        reached += dict.fromkeys(held for _, held in _cells(function) if held is not None and held not in reached)
    return reached


def _cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, types.FunctionType | None]]:
    """Yield the cells of a closure, each with the Python function it holds, if it holds one."""
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            held = None
        yield cell, held if isinstance(held, types.FunctionType) else None


def _looks_up(function: types.FunctionType, name: str) -> bool:
    return _reads(function.__code__, name)


def _reads(code: types.CodeType, name: str) -> bool:
    return any(_uses(part, name) & _READS for part in _codes(code))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield *code* and the code of every function, lambda, comprehension and class in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _uses(code: types.CodeType, name: str) -> frozenset[str]:
    """Return the opcodes that say *name*: a global, an attribute and an import share one entry in ``co_names``."""
    if name not in code.co_names:
        return frozenset()
    known = _said.get(code)
    if known is None:
        said: dict[str, set[str]] = {}
        for instruction in dis.get_instructions(code):
            if instruction.opcode in dis.hasname:
                said.setdefault(instruction.argval, set()).add(instruction.opname)
        known = _said[code] = {each: frozenset(opcodes) for each, opcodes in said.items()}
    return known.get(name, frozenset())


def _refusal(method: Any, name: str, found: str, remedy: str = "Replace the whole method instead.") -> RebindError:
    return RebindError(f"cannot replace {name!r} in {_label(method)}: {found}. {remedy}", method, name)


def _label(what: Any) -> str:
    if isinstance(what, types.CodeType):
        return f"{what.co_name} ({what.co_filename}:{what.co_firstlineno})"
    return f"{what.__module__}.{what.__qualname__}" if _reached(what) else repr(what)


def _home(function: types.FunctionType) -> str:
    """Where *function* looks its globals up: ``__module__`` says where a decorated function comes from."""
    return str(function.__globals__.get("__name__"))


def _what_it_looks_up(method: Any) -> str:
    reached = _reached(method)
    if not reached:
        return f"it is a {type(method).__name__}, in which nothing can be seen to be looked up"
    said = {name for function in reached for code in _codes(function.__code__) for name in code.co_names}
    globals_ = sorted(name for name in said if any(_looks_up(function, name) for function in reached))
    return f"that name is not looked up as a global; these are: {', '.join(globals_) or 'none'}"
