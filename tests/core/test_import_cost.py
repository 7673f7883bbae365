"""Fuseplug records and reports plug-ins that are slow to import, or that import a module that takes seconds."""

import json

import pytest
from support.fixtures import KERNEL
from support.thorough import thorough

from fuseplug.discovery import discover

COSTLY = KERNEL.format("costly")


def costly():
    (record,) = (record for record in discover({}) if record.distribution == "x-costly")
    return record


@pytest.mark.parametrize(("ending", "state"), [("", "ready"), ("1 / 0", "broken")])
def test_a_slow_import_is_recorded_however_it_ends(package, ending, state):
    package("x-costly", "costly", source=f"{COSTLY}import time; time.sleep(0.6)\n{ending}")
    record = costly()
    assert record.state == state
    (cost,) = record.import_costs
    assert cost.startswith("importing x_costly takes ")
    assert cost.endswith(" s: do nothing on import")


def test_a_quick_import_costs_nothing(package, monkeypatch):
    monkeypatch.setattr("fuseplug.discovery.import_cost.SLOW", 60.0)  # a busy machine may be slow
    package("x-costly", "costly", source=COSTLY)
    assert costly().import_costs == ()


@thorough
def test_an_import_of_torch_is_said_by_list_and_does_not_keep_the_kernel_out(package, fresh_python):
    package("x-costly", "costly", source=f"{COSTLY}import torch")
    done = fresh_python("-m", "fuseplug", "list", FUSEPLUG_ALLOW="x-costly", COLUMNS="200")
    said = [line.strip() for line in done.stdout.splitlines()]
    assert "x-costly:costly is slow to import" in said
    assert "importing x_costly imports torch: import it in match() or later" in said
    done = fresh_python("-m", "fuseplug", "list", "--json", FUSEPLUG_ALLOW="x-costly")
    (record,) = (record for record in json.loads(done.stdout) if record["id"] == "costly")
    assert record["state"] == "ready"
    assert "importing x_costly imports torch: import it in match() or later" in record["import_costs"]
