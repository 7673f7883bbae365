"""Finds out which variant a module is: a small stand-in for Fuseplug's verification, written independently of it."""

import pytest
import torch
from torch import nn

from fuseplug_rmsnorm import reference


def twin(module, parameters):
    """A module with the class and attributes of *module*, and with *parameters* in place of its own."""
    copy = object.__new__(type(module))
    copy.__dict__.update(module.__dict__)
    new = {name: nn.Parameter(parameters[name]) for name in module._parameters if name in parameters}
    copy.__dict__["_parameters"] = {**module._parameters, **new}
    copy.__dict__["_buffers"] = {**module._buffers, **{k: v for k, v in parameters.items() if k in module._buffers}}
    return copy


def evaluate(function, module, args):
    """The output of *function* and the gradients of all its inputs and parameters."""
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    out = function(module, *leaves)
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *module.parameters()], cotangent, allow_unused=True)]


def same_bits(a, b):
    if a is None or b is None:
        return a is b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(((a == b) & (a.signbit() == b.signbit()) | a.isnan() & b.isnan()).all())


def survivors(module, proposal, compute=reference.rms_norm):
    """The adapters of *proposal* that match the module bitwise in every mix it runs with, and the number of mixes."""
    adapters, ran = list(proposal.adapters), 0
    for mix in proposal.mixes:
        example = proposal.example(mix, 64, torch.Generator().manual_seed(0))
        try:
            expected = evaluate(type(module).forward, twin(module, example.parameters), example.args)
        except (AttributeError, TypeError, RuntimeError):
            continue
        ran += 1
        adapters = [
            a for a in adapters if _equals(expected, a.bind(compute), twin(module, example.parameters), example)
        ]
    return adapters, ran


def _equals(expected, function, module, example):
    try:
        return all(map(same_bits, expected, evaluate(function, module, example.args)))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


@pytest.fixture(name="survivors")
def _survivors():
    return survivors


@pytest.fixture(name="same_bits")
def _same_bits():
    return same_bits
