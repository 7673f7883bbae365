"""A bias is no rounding: a kernel that is always 0.4 % off in one direction is refused in half precision."""

import itertools

import pytest
import torch
from support import bad
from support.models import tiny_llama, tiny_moe
from support.thorough import first_quick, thorough
from torch.utils._pytree import tree_map as mapped

from fuseplug import KernelManager
from fuseplug_backends.inductor import compiled

MODELS = {
    "rmsnorm": tiny_llama,
    "swiglu": tiny_llama,
    "rope": tiny_llama,
    "moe": tiny_moe,
    "linear_cross_entropy": tiny_llama,
}
HALVES = (torch.bfloat16, torch.float16)
FACTORS = (1.02, 1.01, 1.004, 0.99)


def of_gradients(compute, factor):
    """*compute* with wrong gradients of all arguments."""

    def faulty(*args, **kwargs):
        def scaled(value):
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return bad.WrongGradient.apply(value, factor) if floating else value

        args, kwargs = mapped(scaled, (args, kwargs))
        return compute(*args, **kwargs)

    return faulty


def of_values(compute, factor):
    """*compute* with wrong results, and gradients that fit them."""

    def faulty(*args, **kwargs):
        return mapped(lambda value: value * factor if torch.is_tensor(value) else value, compute(*args, **kwargs))

    return faulty


@pytest.fixture
def planned(monkeypatch):
    """``planned(op, dtype, change)`` plans the op's kernel, with a changed function, in its model."""
    # The question is whether the check sees a fault, not which program has it.
    monkeypatch.setattr(compiled, "SMALL", 1 << 60)

    def plan(op, dtype, change):
        manager = KernelManager()
        kernel_id = f"inductor_fused_{op}"
        (cls,) = (type(record.kernel) for record in manager.kernels() if record.kernel_id == kernel_id)
        load = cls.load
        monkeypatch.setattr(cls, "load", lambda self: change(load(self)))
        return manager.plan(MODELS[op]().to(dtype), include=[kernel_id], allow=["lazy_logits"]).report

    return plan


ROWS = [
    *itertools.product(MODELS, HALVES, FACTORS, ["gradients"]),
    *itertools.product(MODELS, HALVES, (1.004,), ["values"]),
]


@pytest.mark.parametrize(("op", "dtype", "factor", "of"), first_quick(ROWS))
def test_a_bias_is_refused(planned, op, dtype, factor, of):
    change = {"gradients": of_gradients, "values": of_values}[of]
    report = planned(op, dtype, lambda compute: change(compute, factor))
    assert not report.fused
    kinds = {rejection.kind for entry in report.left_alone for _, rejection in entry.rejections}
    assert kinds == {"failed"}


@thorough
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", MODELS)
def test_without_one_it_is_used(planned, op, dtype):
    report = planned(op, dtype, lambda compute: compute)
    assert report.fused
    assert not report.left_alone
