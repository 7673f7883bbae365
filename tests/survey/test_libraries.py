"""The page of diffusers and timm says what was recorded, and its rows of classes hold when they are made anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.thorough import thorough
from torch import nn
from torch.nn import functional as F

from fuseplug import KernelManager

from .libraries import PAGE, class_records, instances
from .library_page import to_markdown

CONTENT = json.loads(Path(PAGE).with_suffix(".json").read_text())
CLASSES = {record["class"]: record for record in CONTENT["classes"]}


class GatedElsewhere(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, hidden_dim), nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim)

    def forward(self, x: Any) -> Any:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def test_the_page_is_made_of_the_records() -> None:
    assert Path(PAGE).read_text() == to_markdown(CONTENT)


def test_nothing_that_is_fused_computes_anything_else() -> None:
    assert [record for record in CONTENT["classes"] if record["status"] == "mismatch"] == []
    assert [record for record in CONTENT["classes"] if not (record["fused"] or record["answer"])] == []


@thorough
def test_a_class_that_nobody_lists_is_found_built_and_compared() -> None:
    (record,) = class_records(KernelManager(environ={}), GatedElsewhere)
    assert (record["op"], record["status"], record["fused"]) == ("swiglu", "checked", True)
    assert list(class_records(KernelManager(environ={}), nn.Linear)) == []
    assert [*instances(nn.AdaptiveLogSoftmaxWithLoss)] == []  # its constructor also needs cutoffs


def rows() -> Iterator[Any]:
    for record in CONTENT["classes"]:
        yield pytest.param(record, id=f"{record['module']}: {record['class']}")


@thorough
@pytest.mark.parametrize("record", rows())
def test_a_row_is_so(record: dict[str, Any]) -> None:
    module = pytest.importorskip(record["module"], reason="a session of its own has these libraries")
    plan = KernelManager(environ={}).plan(next(instances(vars(module)[record["class"]])))
    (entry,) = [entry for entry in plan.report.entries if "" in entry.paths and entry.op == record["op"]]
    assert entry.fused == record["fused"]
    assert (entry.variant if entry.fused else entry.why_not) == record["answer"]
