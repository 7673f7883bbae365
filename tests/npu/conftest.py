"""Fixtures that the tests of NPUs share."""

from __future__ import annotations

import pytest
from support.fixtures import run  # noqa: F401 - pytest finds it here


@pytest.fixture(autouse=True)
def _what_cann_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes known that CANN has the operation, or the first test would count the call that finds it out."""
    from fuseplug_backends.npu import here

    monkeypatch.setitem(here._KNOWN, "npu_clipped_swiglu", True)
