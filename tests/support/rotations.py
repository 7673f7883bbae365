"""Rotations to try on a device, and how their results are judged."""

import functools

import torch

from fuseplug_rope.reference import VARIANTS
from fuseplug_rope.reference import rope as reference

DIM = 16
DTYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]
HALF, PAIRS = "half", "interleaved"
WAYS = [HALF, PAIRS, "half-partial", "interleaved-trailing", "interleaved-first-half-partial", "mla", "mla-full-table"]
"""One variant for each way in which planes are read and written, tables are indexed, and a rest is left over."""

SIZES = [
    {"batch": 3, "length": 3},
    {"batch": 1, "length": 3, "heads": (1, 1)},
    {"length": 2, "heads": (2, 5), "tables": 2},
    {"batch": 1, "length": 3, "dim": 12},
    {"length": 1, "dim": 40, "rest": 22},
]


def tensors(variant=HALF, x=torch.float32, table=None, batch=2, length=5, heads=(3, 2), tables=1, dim=DIM, rest=4):
    """Leaves: q and k as projections give them, ``(batch, sequence, heads, head_dim)``, and the tables."""
    how = VARIANTS[variant]
    generator = torch.Generator().manual_seed(0)
    rotated = dim if how.width == "whole" else dim - rest
    angles = rotated // 2 if how.table == "half" else rotated
    made = [torch.randn(batch, length, h, dim, generator=generator).to(x) for h in heads]
    table = torch.float32 if how.form == "complex" else table or x
    made += [torch.randn(tables, 1, length, angles, generator=generator).to(table) for _ in range(2)]
    return [t.requires_grad_(number < 2) for number, t in enumerate(made)]


def heads_first(x):
    return x.transpose(1, 2)


def seen(of_x, of_table):
    return lambda q, k, cos, sin: (of_x(q), of_x(k), of_table(cos), of_table(sin))


as_attention = seen(heads_first, lambda table: table)

LAYOUTS = {
    "attention": (heads_first, lambda t: t, {}),
    "a table for each of the batch": (heads_first, lambda t: t, {"tables": 2}),
    "heads last": (lambda x: x, lambda t: t.transpose(1, 2), {}),
    "no batch": (lambda x: x[0], lambda t: t[0].transpose(0, 1), {}),
    "sequence first": (lambda x: x.transpose(0, 1), lambda t: t.permute(2, 0, 1, 3), {}),
    "tables of two dimensions": (heads_first, lambda t: t[0, 0], {}),
    "tables repeated for the batch": (heads_first, lambda t: t.expand(2, -1, -1, -1), {}),
    "heads before tokens in memory": (lambda x: heads_first(x).contiguous(), lambda t: t, {}),
    "the same, and a table for each": (lambda x: heads_first(x).contiguous(), lambda t: t, {"tables": 2}),
    "a table for each head": (heads_first, lambda t: t.expand(2, 1, -1, -1).transpose(0, 1), {"heads": (2, 2)}),
    "one token": (heads_first, lambda t: t, {"length": 1}),
    "one token, and a table for each": (heads_first, lambda t: t, {"length": 1, "tables": 2}),
    "one head": (heads_first, lambda t: t, {"heads": (1, 1)}),
    "one head of k": (heads_first, lambda t: t, {"heads": (3, 1)}),
    "one of each": (heads_first, lambda t: t, {"batch": 1, "length": 1, "heads": (1, 1)}),
    "the last tokens": (lambda x: heads_first(x)[..., 2:, :], lambda t: t[..., 2:, :], {"tables": 2}),
    "part of wider rows": (lambda x: heads_first(torch.cat((x, x), -1)[..., :DIM]), lambda t: t, {}),
    "some heads of a wider projection": (lambda x: heads_first(torch.cat((x, x), 2))[:, 1:-1], lambda t: t, {}),
    "elements apart": (lambda x: heads_first(torch.stack((x, -x), -1)[..., 0]), lambda t: t, {}),
    "tokens within elements": (lambda x: heads_first(x).mT.contiguous().mT, lambda t: t, {}),
    "elements apart in the tables": (heads_first, lambda t: torch.stack((t, -t), -1)[..., 0], {}),
    "repeated": (lambda x: heads_first(x[:, :, :1].expand(-1, -1, 3, -1)), lambda t: t, {}),
    "a vector": (lambda x: x[0, 0, 0], lambda t: t[0, 0, 0], {}),
}
"""Views of x as projections give it, views of tables (tables, 1, sequence, angles), and arguments of `tensors`."""

RARE = {
    "float64": (HALF, as_attention, {"x": torch.float64}),
    "tables in float64": (HALF, as_attention, {"table": torch.float64}),
    "five dimensions": (HALF, seen(lambda x: torch.stack((x, -x)).transpose(2, 3), lambda t: t), {}),
    "an odd number": (HALF, as_attention, {"dim": 7}),
    "no tokens": (HALF, as_attention, {"length": 0}),
    "no batch": (PAIRS, as_attention, {"batch": 0}),
    "tables that enlarge": (HALF, as_attention, {"batch": 1, "tables": 3}),
    "a table of more dimensions": (HALF, seen(lambda x: heads_first(x)[0], lambda t: t), {}),
    "a row for every head of every token": (
        HALF,
        seen(heads_first, lambda t: t.expand(2, 3, -1, -1)),
        {"heads": (3, 3)},
    ),
    "other signs in memory": (HALF, seen(lambda x: torch._neg_view(heads_first(x)), torch._neg_view), {}),
    "other signs of the tables": (HALF, seen(heads_first, lambda t: torch.complex(t, t).conj().imag), {}),
    "tables of two shapes": (HALF, lambda q, k, cos, sin: (heads_first(q), heads_first(k), cos, sin[0]), {}),
}
"""Calls that a kernel may leave to the reference: a variant, views of the leaves, and arguments of `tensors`."""


def on(device, leaves, dtype=None):
    return [t.detach().to(device, dtype).requires_grad_(t.requires_grad) for t in leaves]


def outcome(function, leaves, see):
    out = [y for y in function(*see(*leaves)) if y is not None]
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(y.shape, generator=generator).to(y.device, y.dtype) for y in out]
    wanted = [t for t in leaves if t.requires_grad]
    given = [(y, grad) for y, grad in zip(out, grads, strict=True) if y.requires_grad]
    found = torch.autograd.grad([y for y, _ in given], wanted, [grad for _, grad in given]) if wanted else []
    return [*(y.detach().cpu() for y in out), *(t.cpu() for t in found)]


def assert_right(rope, device, leaves, see=as_attention, variant=HALF, roundings=4.0, share_of_theirs=2.0):
    """Assert `fuseplug_verify`'s tolerance: results are judged by the original's error, or by counted roundings."""
    ours = outcome(functools.partial(rope, variant=variant), on(device, leaves), see)
    original = functools.partial(reference, variant=variant)
    theirs, truth = (outcome(original, on("cpu", leaves, dtype), see) for dtype in (None, torch.float64))
    for found, expected, exact in zip(ours, theirs, truth, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        error, allowed = ((t.double() - exact).abs().amax(-1) for t in (found, expected))
        share = roundings * torch.finfo(found.dtype).eps + 16 * torch.finfo(torch.float32).eps
        assert (error <= torch.maximum(share_of_theirs * allowed, share * exact.abs().amax(-1))).all()
