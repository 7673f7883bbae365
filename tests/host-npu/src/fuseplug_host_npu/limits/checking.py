"""Checks calls against the table of limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ContractError
from .registry import Broken, limits

if TYPE_CHECKING:
    from ..torch_private import OpOverload


def check(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Check a call against the limits of *op*, if there are any.

    Raises:
        ContractError: If the call breaks a limit, or has no tensor where the schema asks for one.
    """
    name = op.overloadpacket.__name__
    found = _rows().get(f"{op.namespace}::{name}")
    if found is None and op.namespace == "aten":
        return
    from ..torch_private import arguments_of

    schema = arguments_of(op)
    named = {argument.name: argument.default_value for argument in schema}
    named.update(zip(named, args, strict=False))
    named.update(kwargs)
    for argument in schema:
        if str(argument.type) == "Tensor" and named[argument.name] is None:
            undefined = "undefined, like the gradient after an op without a backward"
            raise ContractError(name, argument.name, "a tensor", undefined, "its schema")
    if found is None:
        return
    function, page = found
    try:
        function(**named)
    except Broken as broken:
        argument, asked, what, source = broken.args
        raise ContractError(name, argument, asked, _describe(what), source or page, documented=source is None) from None


@functools.cache
def _rows() -> dict[str, tuple[Callable[..., None], str]]:
    from . import activations, grouped_matmul, moe, norms, rotary  # noqa: F401 - importing them enters their rows

    return limits


def _describe(value: Any) -> str:
    """*value* in the words of an error message: a tensor by its dtype and shape, a string unchanged."""
    import torch

    if isinstance(value, str):
        return value
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(each) for each in value)}]"
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)
