"""The documented limits of the ops: checked on shapes, dtypes and layouts, so on fake tensors as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import ContractError

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
    """Say that *argument* must be as *asked*, which it is if it *holds*; *found* is what it is."""
    if not holds:
        raise _Broken(argument, asked, found)


def check(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Hold a call to the documented limits of *op*, if there are any.

    Raises:
        ContractError: If it breaks one.
    """
    from .limits import load_all

    load_all()
    found = _limits.get(f"{op.namespace}::{op.overloadpacket.__name__}")
    if found is None:
        return
    function, page = found
    schema = op._schema.arguments
    named = {argument.name: argument.default_value for argument in schema}
    named.update(zip(named, args, strict=False))
    named.update(kwargs)
    try:
        function(**named)
    except _Broken as broken:
        argument, asked, what = broken.args
        raise ContractError(op.overloadpacket.__name__, argument, asked, describe(what), page) from None


def describe(value: Any) -> str:
    """A value in an error message: of a tensor, its dtype and shape."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(describe(each) for each in value)}]"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


class Contract(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, a call that breaks a documented limit raises `ContractError`, on any device.

    `HostNPU` and `FakeNPU` have it built in. By itself it is for a real NPU, and for tensors on ``meta``.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Check, and pass the call on."""
        del types
        check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
