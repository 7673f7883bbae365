"""What the tests of whole models share."""

import pytest
from support.fixtures import checked_once, examined_once  # noqa: F401 - pytest finds them here
from support.losses import in_question


@pytest.fixture(scope="session")
def kernel():
    """The kernel of the loss that is put into models."""
    return in_question()
