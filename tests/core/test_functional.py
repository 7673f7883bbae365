"""How a package makes its public functions."""

import pytest

from fuseplug.functional import computed_by


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
    with pytest.raises(TypeError, match=r"test_functional\.half takes no compute: give it a keyword parameter"):
        computed_by(fused, half)
