"""Fixtures for the tests of whole models."""

import pytest
from support.fixtures import checked_once, examined_once  # noqa: F401 - pytest finds them here
from support.losses import in_question


@pytest.fixture(scope="session")
def kernel():
    """The loss kernel that is applied to models."""
    return in_question()
