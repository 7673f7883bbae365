"""A kernel whose function is the reference, so that what is found can be tested without computing in chunks."""

import pytest
from support.recurrences import reference_manager


@pytest.fixture
def manager():
    return reference_manager("gated_delta_rule")
