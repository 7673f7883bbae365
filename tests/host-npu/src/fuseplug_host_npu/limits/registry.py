"""The table of limits, one row for each op whose documentation has some. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ContractError

if TYPE_CHECKING:
    from ..torch_private import OpOverload

Limit = TypeVar("Limit", bound=Callable[..., None])

_limits: dict[str, tuple[Callable[..., None], str]] = {}


class _Broken(Exception):  # noqa: N818 - it never leaves this file
    pass


def limit(*names: str, page: str) -> Callable[[Limit], Limit]:
    """Decorate a function that says, with `require`, what an op's documentation asks of its arguments.

    It is given the arguments by the names in the op's schema, all of them, and must not look at values: what it checks
    is checked on fake tensors too, and on an NPU values are not there yet.

    Args:
        *names: The ops, without their overloads: ``"npu_swiglu"``, or ``"my_library::my_op"``.
        page: Where it is documented.
    """

    def register(function: Limit) -> Limit:
        for name in names:
            _limits[name if "::" in name else f"npu::{name}"] = (function, page)
        return function

    return register


def require(holds: bool, argument: str, asked: str, found: object) -> None:
    """Say that *argument* must be as *asked*, which it is if it *holds*; *found* is what it is: a value, or words."""
    if not holds:
        raise _Broken(argument, asked, found)


def check(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Hold a call to the documented limits of *op*, if there are any.

    Raises:
        ContractError: If it breaks one.
    """
    from ..torch_private import arguments_of
    from . import activations, grouped_matmul, moe, norms, rotary  # noqa: F401 - their rows enter themselves

    name = op.overloadpacket.__name__
    found = _limits.get(f"{op.namespace}::{name}")
    if found is None and op.namespace == "aten":
        return
    schema = arguments_of(op)
    named = {argument.name: argument.default_value for argument in schema}
    named.update(zip(named, args, strict=False))
    named.update(kwargs)
    for argument in schema:
        if str(argument.type) == "Tensor" and named[argument.name] is None:
            undefined = "undefined, as a gradient is behind an op that has no backward"
            raise ContractError(name, argument.name, "a tensor", undefined, "its schema")
    if found is None:
        return
    function, page = found
    try:
        function(**named)
    except _Broken as broken:
        argument, asked, what = broken.args
        raise ContractError(name, argument, asked, _describe(what), page) from None


def _describe(value: Any) -> str:
    """What was found, in an error message: of a tensor, its dtype and shape; words as they are."""
    import torch

    if isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(each) for each in value)}]"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)
