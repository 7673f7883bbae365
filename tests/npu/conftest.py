"""Tests that run by themselves on any release of torch_npu: ``-k fake_npu``."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let tests be chosen by the fixtures that they use."""
    for item in items:
        item.extra_keyword_matches.update(getattr(item, "fixturenames", ()))
