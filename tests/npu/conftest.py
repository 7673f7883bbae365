"""Tests that run by themselves on any release of torch_npu: ``-k fake_npu``."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests be chosen by the fixtures that they use."""
    for item in items:
        item.extra_keyword_matches.update(getattr(item, "fixturenames", ()))


@pytest.fixture(autouse=True)
def _what_cann_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know it, or the call that finds it out is counted in the test that comes first."""
    from fuseplug_backends.npu import here

    monkeypatch.setitem(here._KNOWN, "npu_clipped_swiglu", True)
