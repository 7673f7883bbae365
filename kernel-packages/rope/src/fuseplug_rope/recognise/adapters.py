"""How the calls of a rotary function become calls with the one signature of the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fuseplug import Adapter, Compute

from .roles import Roles

RowAlignment = Literal["all", "first", "last", "patches"]
"""Which tokens and rows of the tables belong together if there are more of one than of the other.

With ``"all"``, there must not be. The ``"first"`` or the ``"last"`` rows are used; or only the last tokens are rotated,
the ``"patches"``.
"""


@dataclass(frozen=True)
class RotaryAdapter(Adapter):
    """Calls RoPE in the place of a function that a method looks up.

    Attributes:
        variant: A key of `fuseplug_rope.reference.VARIANTS`.
        roles: What the function's parameters are.
        unsqueeze: The dimension that the function adds to the tables if no parameter says which; ``None`` for none.
        gathers: Whether the function picks the rows of the tables by the positions.
        alignment: Which tokens and rows of the tables belong together.
        bare: Whether the function returns a tensor, not a tuple, if there is no k.
    """

    variant: str
    roles: Roles
    unsqueeze: int | None = None
    gathers: bool = False
    alignment: RowAlignment = "all"
    bare: bool = True

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a function with the positional parameters of the one it replaces.

        The tensors to rotate are ``(..., head_dim)``, floating. The tables are ``(..., angles)``, float or, for
        frequencies, complex; with the dimension that *unsqueeze* adds, they are broadcastable to the tensors. The
        result is the rotated tensors in their shapes, one tensor or a tuple. Errors are those of `reference.rope`.
        """
        roles = self.roles
        ordinary = (roles.rotated, roles.cos, roles.sin, roles.sections) == ((0, 1), 2, 3, None)
        if ordinary and self.alignment == "all" and not self.gathers and roles.required >= 4:
            return self._bind_ordinary(compute)
        return self._bind_any(compute)

    def _bind_ordinary(self, compute: Compute) -> Callable[..., Any]:
        variant, fixed, at = self.variant, self.unsqueeze, self.roles.unsqueeze
        if at is None:
            if fixed is None:
                return lambda q, k, cos, sin, *_: compute(q, k, cos, sin, variant=variant)
            return lambda q, k, cos, sin, *_: compute(q, k, cos.unsqueeze(fixed), sin.unsqueeze(fixed), variant=variant)
        place, default = at - 4, self.roles.defaults[at]

        # Lean, because with one token the caller waits for this function.
        def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any) -> Any:
            dim = others[place] if len(others) > place else default
            return compute(q, k, cos.unsqueeze(dim), sin.unsqueeze(dim), variant=variant)

        return rotary

    def _bind_any(self, compute: Compute) -> Callable[..., Any]:
        roles, variant = self.roles, self.variant
        rotate = {"all": _all, "first": _with_first, "last": _with_last, "patches": _patches}[self.alignment]

        def rotary(*args: Any) -> Any:
            values = (*args, *roles.defaults[len(args) :])
            cos, sin = self._tables(values)
            tensors = [values[at] for at in roles.rotated]
            present = [x for x in tensors if x is not None]
            rotated = rotate(compute, variant, present, cos, sin)
            if len(present) == 1 and (self.bare or len(tensors) == 1):
                return rotated[0]
            return (*rotated, *(None for _ in tensors[len(present) :]))

        return rotary

    def _tables(self, values: Sequence[Any]) -> tuple[Tensor, Tensor]:
        roles = self.roles
        if roles.frequencies is not None:
            numbers = values[roles.frequencies]
            cos, sin = numbers.real, numbers.imag
        elif roles.pairs is not None:
            # As many rows as there are tokens, from the first on.
            cos, sin = values[roles.pairs][: values[roles.rotated[0]].shape[0]].unbind(-1)
        else:
            cos, sin = values[roles.cos], values[roles.sin]  # type: ignore[index]
        if self.gathers:
            positions = values[roles.positions]  # type: ignore[index]
            cos, sin = cos[positions], sin[positions]
        if roles.sections is not None:
            sections = values[roles.sections]
            cos, sin = _sectioned(cos, sections), _sectioned(sin, sections)
        dim = self.unsqueeze if roles.unsqueeze is None else values[roles.unsqueeze]
        return (cos, sin) if dim is None else (cos.unsqueeze(dim), sin.unsqueeze(dim))


@dataclass(frozen=True)
class MethodAdapter(Adapter):
    """Calls RoPE in the place of a method that is called as a function would be.

    Attributes:
        variant: A key of `fuseplug_rope.reference.VARIANTS`.
        function: The adapter for a function that is called so.
    """

    variant: str
    function: RotaryAdapter

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a method with the positional parameters of the one it replaces; otherwise as `RotaryAdapter.bind`."""
        rotary = self.function.bind(compute)
        return lambda _module, *args: rotary(*args)


@dataclass(frozen=True)
class ConformerAdapter(Adapter):
    """Calls RoPE in the place of a method that rotates ``(batch, sequence, heads * head_dim)``.

    Attributes:
        variant: A key of `fuseplug_rope.reference.VARIANTS`.
        heads: Name of the attribute with the number of heads.
        head_dim: Name of the attribute with the size of a head.
    """

    variant: str
    heads: str
    head_dim: str

    @property
    def reads(self) -> tuple[str, ...]:
        """Both numbers."""
        return self.heads, self.head_dim

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``method(module, hidden_states, tables)``.

        ``hidden_states`` is ``(batch, sequence, heads * head_dim)``, floating, and so is the result; the tables are
        ``(2, sequence, 1, 1, head_dim)``, cosines and sines. Errors are those of `reference.rope`.
        """

        def rotary(module: nn.Module, hidden_states: Tensor, tables: Tensor) -> Tensor:
            batch, length, width = hidden_states.size()
            x = hidden_states.view(batch, length, getattr(module, self.heads), getattr(module, self.head_dim))
            cos, sin = tables[0, :length, ...], tables[1, :length, ...]
            rotated: Tensor = compute(x.transpose(0, 1), None, cos, sin, variant=self.variant)[0]
            return rotated.transpose(0, 1).reshape(batch, length, width)

        return rotary


def _sectioned(table: Tensor, sections: Sequence[int]) -> Tensor:
    """One table from those of several axes, ``(axes, batch, sequence, angles)``: each section from the next axis."""
    parts = torch.split(table, [*sections, *sections], dim=-1)
    return torch.cat([part[number % 3] for number, part in enumerate(parts)], dim=-1)


def _all(compute: Compute, variant: str, xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    rotated: list[Tensor] = []
    for first in range(0, len(xs), 2):
        pair = xs[first : first + 2]
        rotated += compute(pair[0], pair[1] if pair[1:] else None, cos, sin, variant=variant)[: len(pair)]
    return rotated


def _with_first(compute: Compute, variant: str, xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    def rows(table: Tensor, x: Tensor) -> Tensor:
        return table[..., : x.shape[-2], :]

    return [compute(x, None, rows(cos, x), rows(sin, x), variant=variant)[0] for x in xs]


def _with_last(compute: Compute, variant: str, xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    def rows(table: Tensor, x: Tensor) -> Tensor:
        return table[..., -x.shape[-2] :, :]

    if all(x.shape[-2] == cos.shape[-2] for x in xs):
        return _all(compute, variant, xs, cos, sin)
    return [compute(x, None, rows(cos, x), rows(sin, x), variant=variant)[0] for x in xs]


def _patches(compute: Compute, variant: str, xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Rotate the last tokens, as many as the tables have rows; the tokens before them have no position."""
    rows = sin.shape[-2]
    parts = [torch.split(x, [x.shape[-2] - rows, rows], dim=-2) for x in xs]
    rotated = _all(compute, variant, [patches for _, patches in parts], cos, sin)
    return [torch.cat((x, y), dim=-2) if x.shape[-2] else y for (x, _), y in zip(parts, rotated, strict=True)]
