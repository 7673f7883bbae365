"""What a rotary function does besides computing: a fused one would not do it, so such a function is left alone."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
from typing import Any

from fuseplug import called_functions

_WRITES = {
    "STORE_GLOBAL": "sets the global",
    "DELETE_GLOBAL": "deletes the global",
    "STORE_ATTR": "sets the attribute",
    "DELETE_ATTR": "deletes the attribute",
}
_BUILTINS = ("print", "input", "open", "exec", "eval", "setattr", "globals")
_STATE = (dict, list, set, bytearray)


def side_effect(function: types.FunctionType, cls: type | None = None) -> str | None:
    """What *function*, or a function of Python that it calls, does besides computing; ``None`` if nothing is seen.

    Writing into a tensor is not looked for: that shows when the function is run.

    Args:
        function: A function; or a method, which may call others of *cls*.
        cls: The class that it is a method of.
    """
    waiting, seen = [function], {function}
    for each in waiting:  # grows on the way
        if found := next(_effects(each), None):
            return found if each is function else f"calls {each.__name__}, which {found}"
        called: Any = [*called_functions(each).values(), *_methods(each, cls)]
        waiting += [f for f in called if f not in seen and not f.__module__.startswith("torch")]
        seen.update(called)
    return None


def _methods(function: types.FunctionType, cls: type | None) -> list[types.FunctionType]:
    found = (getattr(cls, name, None) for name in function.__code__.co_names) if cls is not None else ()
    return [method for method in found if isinstance(method, types.FunctionType)]


def _effects(function: types.FunctionType) -> Iterator[str]:
    code = function.__code__
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if instruction.opname in _WRITES:
            yield f"{_WRITES[instruction.opname]} {name!r}"
        elif instruction.opname == "STORE_DEREF" and name in code.co_freevars:
            yield f"sets {name!r}, which belongs to the function around it"
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name == "register_buffer":
            yield "registers a buffer"
        elif instruction.opname == "LOAD_GLOBAL" and name not in function.__globals__ and name in _BUILTINS:
            yield f"calls {name}()"
        elif instruction.opname == "LOAD_GLOBAL" and isinstance(function.__globals__.get(name), _STATE):
            yield f"uses the global {name!r}, which is state that may change"
