"""What all tests share."""

from __future__ import annotations

import os

import pytest

# A test that finds what another run has kept tests nothing. Processes that tests start inherit this.
os.environ["FUSEPLUG_CACHE"] = "off"
# The models of tests are small, and small calls are the originals'. tests/core/test_gains.py has calls as users make.
os.environ["FUSEPLUG_EVERY_SIZE"] = "1"


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """A tolerance that one draw in a thousand exceeds is a test that fails one day, for nobody's mistake."""
    import torch  # not before a plug-in had its say: torch_npu needs its stand-in first

    torch.manual_seed(0)
