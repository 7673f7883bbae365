"""Compiled formulas keep working whatever else happens in the process."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

from fuseplug.inductor import Compiled, CompiledLinear


def double(x):
    return x * 2.0


def scale(x, table):
    return x * table


ROWS = Compiled(double)
LINEAR = CompiledLinear(scale)
TABLE = torch.full((1, 8), 2.0)


@pytest.mark.parametrize(
    "run", [lambda x: ROWS((), x), lambda x: LINEAR(((),), (x,), (TABLE,))[0]], ids=["rows", "linear"]
)
@torch._dynamo.config.patch(recompile_limit=2)
@pytest.mark.usefixtures("fresh_nodes")
def test_new_kinds_of_pytree_node_do_not_use_up_the_limit_of_recompilations(run):
    x = torch.ones(4, 8, requires_grad=True)
    for number in range(4):
        kind = dataclasses.make_dataclass(f"Output{number}", ["logits"])
        pytree.register_pytree_node(kind, lambda o: ([o.logits], None), lambda values, _, kind=kind: kind(*values))
        (gradient,) = torch.autograd.grad(run(x), x, torch.ones(4, 8))
        assert torch.equal(gradient, torch.full((4, 8), 2.0))


@pytest.fixture(name="fresh_nodes")
def _fresh_nodes():
    before = dict(pytree.SUPPORTED_NODES)
    yield
    for kind in pytree.SUPPORTED_NODES.keys() - before.keys():
        del pytree.SUPPORTED_NODES[kind]
