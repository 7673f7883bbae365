"""How a package makes its public functions."""

import threading

import pytest
import torch
from support.kernels import NormKernel, norm_reference, quiet_norm, variant_of
from support.managers import manager_of
from support.models import Norm

from fuseplug.fallback import by_reference, this_thread
from fuseplug_backends.functional import computed_by


def twice(x, *, compute=lambda x: 2 * x):
    """The reference."""
    return compute(x)


def half(x):
    return x / 2


def fused(x):
    """The kernel."""
    return x + x + 1


def test_the_function_is_the_reference_with_the_kernel_in_it():
    function = computed_by(fused, twice)
    assert (twice(3), function(3)) == (6, 7)
    assert (function.__name__, function.__doc__) == ("twice", "The kernel.")


def test_a_reference_that_takes_no_compute_is_refused_when_the_function_is_made():
    with pytest.raises(TypeError, match=r"test_functional\.half takes no argument compute: add this keyword parameter"):
        computed_by(fused, half)


def one_row_by_reference(x, *arguments):
    """A kernel's function that leaves a single row to its reference."""
    if x.shape[:-1].numel() == 1:
        return by_reference(norm_reference, x, *arguments)
    return quiet_norm(x, *arguments)


class TestByReference:
    @pytest.fixture
    def fused(self):
        kernel = variant_of(NormKernel, function=f"{__name__}:one_row_by_reference")
        module = Norm(16)
        return module, manager_of(kernel).apply_all(module, verify=False)

    def test_what_a_function_leaves_to_its_reference_is_not_counted_as_the_kernels(self, fused):
        module, applied = fused
        one, two = torch.randn(1, 16), torch.randn(2, 16)
        for x in (one, two, one, two, two):
            module(x)
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(3, 2)]
        (tried,) = applied.try_(one)
        assert (tried.fused, tried.original) == (0, 1)
        assert tried.reasons == ("the kernel's function leaves it to its reference",)

    def test_a_call_by_hand_before_changes_no_count(self, fused):
        module, applied = fused
        one_row_by_reference(torch.randn(1, 16), module.weight, 1e-6)
        assert this_thread.declined
        module(torch.randn(2, 16))
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 0)]

    def test_nor_do_those_of_another_thread(self, fused):
        module, applied = fused
        another = threading.Thread(target=one_row_by_reference, args=(torch.randn(1, 16), module.weight, 1e-6))
        another.start()
        another.join()
        assert not this_thread.declined
        module(torch.randn(2, 16))
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 0)]

    def test_a_fused_module_that_the_reference_calls_is_counted_by_itself(self, fused):
        module, applied = fused
        by_reference(module, torch.randn(2, 16))
        assert this_thread.declined
        assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 0)]
