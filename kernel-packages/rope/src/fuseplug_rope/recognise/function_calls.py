"""The forms in which models call a rotary function. Calling a function shows which forms it takes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fuseplug import Example

from .adapters import RowAlignment
from .roles import Roles

# No two sizes are alike, and half a table is wider than one, so that nothing fits another dimension by chance.
_SIZES = {"b": 2, "h": 3, "s": 5, "t": 7, "1": 1}
_K_HEADS = 2
HALF_TYPES = (torch.bfloat16, torch.float16)
SMALL_HEAD, _LARGE_HEAD = 16, 64
_LARGE = 1 << 10
"""The number of elements from which on an example has heads of the module's size."""

_ROWS_BEYOND = 2


class CallLayout(NamedTuple):
    """The dimensions of x and of the tables, in order: batch, heads, sequence, head_dim; ``t`` is rows to pick from.

    Attributes:
        x: The dimensions of x.
        table: The dimensions of the tables.
        dims: Where the tables may be unsqueezed to fit x; ``None`` for nowhere.
    """

    x: str
    table: str
    dims: tuple[int | None, ...]


WITH_PARAMETER = (
    CallLayout("bhsd", "bsd", (1, -3)),
    CallLayout("bshd", "bsd", (2, -2)),
    CallLayout("bhsd", "sd", (0,)),
)
"""For a function with a parameter for the dimension; each layout is tried with each of its *dims*."""

WITHOUT_PARAMETER = (
    CallLayout("shd", "sd", (1, -2)),
    CallLayout("bshd", "bsd", (2, -2)),
    CallLayout("bhsd", "bsd", (1, -3)),
    CallLayout("bhsd", "sd", (None, 0)),
    CallLayout("bshd", "sd", (1, -2)),
    CallLayout("bhsd", "11sd", (None,)),
    CallLayout("bshd", "s1d", (None,)),
    CallLayout("bshd", "1s1d", (None,)),
)

WITH_PAIRS = (
    CallLayout("sbhd", "s1d", (2, -2)),
    CallLayout("sbhd", "sbd", (2, -2)),
)
"""For a function whose table holds pairs; the sequence comes first."""

Width = Literal["full", "half", "three-quarters", "quarter"]
WIDTH_SHARES: dict[Width, float] = {"full": 1.0, "half": 0.5, "three-quarters": 0.75, "quarter": 0.25}
"""Widths, the likely ones first, as shares of head_dim."""

Positions = Literal["ids", "table"]


@dataclass(frozen=True)
class Form:
    """One way to call the function.

    Attributes:
        layout: The order of the dimensions.
        width: How many angles the tables have, as a share of head_dim.
        dim: The dimension to unsqueeze, given explicitly; ``None`` if it is left to the default.
        positions: What is given as positions: nothing, ``"ids"`` beside tables that already have a row for each token,
            or ids into a ``"table"``.
        alignment: How the numbers of tokens and of rows differ.
        without_k: Whether k is ``None``.
    """

    layout: CallLayout
    width: Width = "full"
    dim: int | None = None
    positions: Positions | None = None
    alignment: RowAlignment = "all"
    without_k: bool = False


class CallMix(NamedTuple):
    """A form, and the dtypes of the first rotated tensor, of the others, and of the tables."""

    form: Form
    x: torch.dtype
    others: torch.dtype
    table: torch.dtype


Make = Callable[..., Tensor]


def arguments(form: Form, roles: Roles, mix: CallMix, make: Make, tokens: int, head_dim: int) -> list[Any]:
    """The positional arguments of *form*: no more than it needs.

    Args:
        form: The form of the call.
        roles: What the function's parameters are.
        mix: The dtypes.
        make: ``make(shape, dtype)`` returns a tensor of any numbers.
        tokens: The length of the sequence.
        head_dim: The size of a head.

    Returns:
        Tensors shaped as the form's layout says, in the dtypes of *mix*; their last dimension is *head_dim* if they are
        to be rotated, and the form's width for tables. Positions are ``(batch, tokens)`` int64. A k that is left out is
        ``None``.
    """
    sizes = {**_SIZES, "s": tokens, "t": tokens + _ROWS_BEYOND, "d": head_dim}
    values: dict[int, Any] = {}
    for number, at in enumerate(roles.rotated):
        longer = _ROWS_BEYOND if _is_longer(form.alignment, number) else 0
        tensor_sizes = {**sizes, "h": sizes["h"] if number == 0 else _K_HEADS, "s": tokens + longer}
        dtype = mix.x if number == 0 else mix.others
        values[at] = None if form.without_k and number else _projected(form.layout.x, tensor_sizes, make, dtype)
    angles = int(head_dim * WIDTH_SHARES[form.width])
    rows = form.layout.table if form.positions != "table" else "td"
    # Tables whose first rows are used, or whose last rows a short q uses, are longer than the first tensor.
    longer = _ROWS_BEYOND if form.alignment in ("first", "last") else 0
    table_sizes = {**sizes, "s": tokens + longer, "d": angles}
    shape = [table_sizes[dim] for dim in rows]
    axes = [] if roles.sections is None else [3]
    for place in (roles.cos, roles.sin, roles.frequencies):
        if place is not None:
            values[place] = make([*axes, *shape], mix.table)
    if roles.pairs is not None:
        values[roles.pairs] = make([*shape, 2], mix.table)
    if roles.sections is not None:
        half = angles // 2
        values[roles.sections] = [half // 4, half // 4, half - 2 * (half // 4)]
    if roles.unsqueeze is not None and form.dim is not None:
        values[roles.unsqueeze] = form.dim
    if roles.positions is not None and form.positions is not None:
        ids = torch.arange(sizes["b"] * tokens, device="cpu").view(sizes["b"], tokens)
        values[roles.positions] = ids * 3 % sizes["t"]
    count = max(roles.required, 1 + max(values))
    return [values.get(at, roles.defaults[at]) for at in range(count)]


def _projected(layout: str, sizes: Mapping[str, int], make: Make, dtype: torch.dtype) -> Tensor:
    """A tensor that lies in memory as a projection leaves it: the heads of a token side by side."""
    memory = f"{layout.replace('h', '').replace('d', '')}hd"
    return make([sizes[dim] for dim in memory], dtype).permute([memory.index(dim) for dim in layout])


def _is_longer(alignment: RowAlignment, number: int) -> bool:
    return alignment == "patches" or (alignment == "last" and number > 0)


def accepted(
    function: Callable[..., Any], roles: Roles, head_dim: int = SMALL_HEAD, plain: Sequence[Width] = ("full", "half")
) -> tuple[list[Form], str, bool]:
    """Call *function* in every form.

    Args:
        function: The function.
        roles: What its parameters are.
        head_dim: The size of the heads that it is given.
        plain: The widths that the tables may have in the plainest form.

    Returns:
        The forms that the function takes, the plainest first; why it takes none; and whether it returns a bare tensor
        if there is no k.
    """
    why = ""

    def takes(form: Form) -> bool:
        nonlocal why
        error = _error(function, form, roles, head_dim)
        why = why or error
        return not error

    taken = [form for form in _plain_forms(roles, plain) if takes(form)]
    if not taken:
        return [], why, True
    base = taken[0]
    narrower: tuple[Width, ...] = ("half", "three-quarters", "quarter")
    widths = [width for width in narrower if width != base.width and takes(replace(base, width=width))]
    # A function that takes fewer angles will be called with fewer.
    forms = [*(replace(base, width=width) for width in widths), *(form for form in taken if form.width == base.width)]
    forms += [form for form in _uncommon_forms(forms, roles) if takes(form)]
    without_k = next((form for form in forms if form.without_k), None)
    bare = without_k is None or isinstance(_call(function, without_k, roles, head_dim), Tensor)
    return forms, "", bare


def widens(function: Callable[..., Any], form: Form, roles: Roles, head_dim: int = SMALL_HEAD) -> bool:
    """Whether *function*, which takes *form*, gives q in float32 if q is in bfloat16 and the tables are in float32."""
    try:
        result = _call(function, form, roles, head_dim, torch.bfloat16)
    except Exception:  # noqa: BLE001 - a third party's function may raise anything, and be right in other dtypes
        return False
    return bool((result[0] if isinstance(result, tuple | list) else result).dtype is torch.float32)


def _plain_forms(roles: Roles, plain: Sequence[Width]) -> Iterator[Form]:
    layouts: Sequence[CallLayout] = WITHOUT_PARAMETER if roles.unsqueeze is None else WITH_PARAMETER
    positions_given: list[Positions | None] = [None, "ids", "table"] if roles.positions is not None else [None]
    if roles.positions is not None and roles.positions < roles.required:
        positions_given = ["ids", "table"]
    widths = [width for width in plain if width != "full" or roles.cos is not None]
    if roles.pairs is not None:
        layouts = WITH_PAIRS
    for positions, width, layout in itertools.product(positions_given, widths, layouts):
        if positions != "table" or "b" in layout.table:
            yield Form(layout, width, positions=positions)
    if roles.unsqueeze is not None:
        for positions, width, layout in itertools.product(positions_given, widths, layouts):
            for dim in layout.dims:
                if positions != "table" or "b" in layout.table:
                    yield Form(layout, width, dim, positions)


def _uncommon_forms(forms: Sequence[Form], roles: Roles) -> Iterator[Form]:
    first = forms[0]
    if first.positions != "table":
        yield replace(first, alignment="first")
        yield replace(first, alignment="patches")
    if len(roles.rotated) > 1:
        yield replace(first, alignment="last")
        yield replace(first, without_k=True)
        # A call that gives the dimension has one argument more, so it is another way of calling.
        yield from (replace(form, without_k=True) for form in forms if form.dim is not None and form.dim > 0)


def _error(function: Callable[..., Any], form: Form, roles: Roles, head_dim: int) -> str:
    """Why *function* does not take *form*; ``""`` if it does, and returns the rotated tensors in their shapes."""
    try:
        result = _call(function, form, roles, head_dim)
    except Exception as error:  # noqa: BLE001 - a third party's function may raise anything
        # After the first paragraph, torch's dispatcher lists where each of its backends is registered.
        return f"{type(error).__name__}: " + str(error).partition("\n\n")[0]
    results = result if isinstance(result, tuple | list) else [result]
    shapes = [tuple(tensor.shape) for tensor in results if isinstance(tensor, Tensor)]
    zeroed = _arguments_of_zeros(form, roles, head_dim)
    expected = [tuple(zeroed[at].shape) for at in roles.rotated if zeroed[at] is not None]
    return "" if shapes == expected else f"it returns shapes {shapes}; expected are {expected}"


def _call(function: Callable[..., Any], form: Form, roles: Roles, head_dim: int, x: torch.dtype = torch.float32) -> Any:
    with torch.no_grad():
        return function(*_arguments_of_zeros(form, roles, head_dim, x))


def _arguments_of_zeros(form: Form, roles: Roles, head_dim: int, x: torch.dtype = torch.float32) -> list[Any]:
    mix = CallMix(form, x, x, torch.float32 if roles.frequencies is None else torch.complex64)
    return arguments(form, roles, mix, zeros, _SIZES["s"], head_dim)


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros of *shape* in *dtype*."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def normal(generator: torch.Generator, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal numbers of *shape*, drawn in float32 and cast to *dtype*, unless that is complex."""
    drawn = dtype if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=drawn, device="cpu").to(dtype)


def mixes(forms: list[Form], roles: Roles, dtype: torch.dtype) -> list[CallMix]:
    """The plainest form in every combination of dtypes, the module's first; the other forms in the first one only."""
    wide = torch.float32
    if roles.frequencies is not None:
        pairs = [(x, x, torch.complex64) for x in (*HALF_TYPES, wide)]
    else:
        pairs = [(x, x, x) for x in (*HALF_TYPES, wide)] + [(x, x, wide) for x in HALF_TYPES]
        pairs += [(wide, wide, torch.bfloat16)]
    if len(roles.rotated) > 1:
        pairs += [(torch.bfloat16, wide, pairs[0][2])]
    pairs.sort(key=lambda dtypes: dtypes[0] is not dtype)
    return [*(CallMix(forms[0], *dtypes) for dtypes in pairs), *(CallMix(form, *pairs[0]) for form in forms[1:])]


def example(
    roles: Roles, small_head: int, large_head: int | None, mix: CallMix, size: int, generator: torch.Generator
) -> Example:
    """Random `arguments` of *mix*, with tables whose halves differ; for a large *size*, heads have *large_head*."""
    width = small_head if size < _LARGE else (large_head or _LARGE_HEAD)
    per_token = width * (_SIZES["h"] * _SIZES["b"] if "b" in mix.form.layout.x else _SIZES["h"])
    make, tokens = functools.partial(normal, generator), max(_SIZES["s"], -(-size // per_token))
    return Example(arguments(mix.form, roles, mix, make, tokens, width))
