"""Compiled formulas keep working whatever else happens in the process."""

import dataclasses
import os
import subprocess
import sys

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


PROBES = """
import torch
from torch._inductor import cpu_vec_isa
X, built = torch.ones(4, 8), []
check = cpu_vec_isa.VecISA.check_build
cpu_vec_isa.VecISA.check_build = lambda self, code: built.append(code) or check(self, code)
{call}
print(built.count(cpu_vec_isa.VecISA._avx_code), *map(str, cpu_vec_isa.valid_vec_isa_list()), sep="|")
"""
ASKED_BY = {
    "Inductor": "torch.compile(lambda x: x * 2)(X)",
    "fuseplug": "from fuseplug.inductor import program_of; program_of(lambda x: x * 2, torch.mul, 'cpu')(X)",
}


def test_vector_instructions_are_tried_once_and_found_to_be_the_same(tmp_path):
    said = {
        who: subprocess.run(
            [sys.executable, "-c", PROBES.format(call=call)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / who)},
        ).stdout.strip()
        for who, call in ASKED_BY.items()
    }
    counts, found = zip(*(text.split("|", 1) for text in said.values()), strict=True)
    assert found[0] == found[1]
    assert int(counts[1]) == min(1, int(counts[0])), said
