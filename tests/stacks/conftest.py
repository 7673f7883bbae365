"""Keeps the options of one test's Trainer from the next test."""

import os
from unittest import mock

import pytest
from support.fixtures import checked_once, examined_once  # noqa: F401 - pytest finds them here


@pytest.fixture(autouse=True)
def environment():
    """Restore the environment: transformers 4.57 puts options of a Trainer into it, such as bfloat16."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            del os.environ[name]
        yield
