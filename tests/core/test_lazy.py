"""Names of a package that are imported at their first use."""

import subprocess
import sys

import pytest

from fuseplug.lazy import lazy


def test_a_name_is_not_that_of_its_module():
    # Importing a module sets it in its package, under its own name, so Python no longer asks `__getattr__`.
    with pytest.raises(
        ValueError, match=r"here\.compare would be the module here\.compare once that is imported: rename it"
    ):
        lazy("here", {"Result": ".compare", "compare": ".compare"})


@pytest.mark.thorough
def test_names_mean_the_same_in_any_order():
    code = "from fuseplug_tools.bench import Benchmark, compare, machine; print(callable(compare), callable(machine))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "True True\n"
