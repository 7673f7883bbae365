"""No test here starts from what another test's Trainer was asked for."""

import os
from unittest import mock

import pytest
from support.fixtures import checked_once, examined_once  # noqa: F401 - pytest finds them here


@pytest.fixture(autouse=True)
def environment():
    """transformers 4.57 puts what a Trainer is asked for, bfloat16 for example, into the environment of the process."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
        yield
