"""A kernel whose function is the reference, so that tests of what is found compute nothing in chunks."""

import pytest
from support.recurrences import reference_manager


@pytest.fixture
def manager():
    return reference_manager("gated_delta_rule")
