"""The private names of torch that this package uses; no other module of it uses one.

Importing this module imports torch. Each name is here because torch documents nothing that says or does the same.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.library import Library

__all__ = [
    "FAKE_TENSOR_LOG",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "arguments_of",
    "destroy",
    "neg_view",
    "registered_for",
]

# Imported above: the type of operations (torch.ops has only instances), the mode in which tensors are fake, and the
# base class of modes that see each operation.

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The name of the logger on which fake tensors report calls that fail."""

neg_view = torch._neg_view
"""``neg_view(tensor)``: *tensor* negated by its negative bit, in the same memory. `torch.neg` writes new memory."""


@functools.cache
def arguments_of(op: OpOverload) -> tuple[torch._C.Argument, ...]:
    """The arguments in the schema of *op*; ``torch.ops`` does not give their names and defaults."""
    return tuple(op._schema.arguments)


def registered_for(key: str) -> list[str]:
    """The qualified names of the ops with a kernel for the dispatch key *key*; torch.library does not list them."""
    return list(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def destroy(library: Library) -> None:
    """Remove what *library* has registered, now; torch.library waits until *library* is collected as garbage."""
    library._destroy()  # type: ignore[no-untyped-call]
