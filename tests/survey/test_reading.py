"""The classes of transformers that compute an op are read completely, and do nothing but compute."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from support.thorough import thorough
from survey.census import Census
from survey.single_class import Class, classes, instance

from fuseplug_verify.reading.findings import Reading
from fuseplug_verify.reading.reader import read

CENSUS = Census.of(transformers.__version__)
OPS = ("rmsnorm", "swiglu", "moe")
NOT_READ = {"Zamba2MLP", "NllbMoeExperts", "modernbert.apply_rotary_unpadded", "qwen2_5_omni.apply_rotary_pos_emb"}
"""They choose the child that they call by name or number; or, in 4.57, they call a function of autograd or one that is
made in the call. No kernel takes them: docs/coverage.md says why.
"""
if transformers.__version__ < "5":  # mostly for the router, which no kernel replaces; otherwise the class is left alone
    NOT_READ |= {f"{name}MoE" for name in ("DeepseekV3", "Dots1", "Glm4Moe", "Glm4vMoeText", "LongcatFlash")}
    NOT_READ |= {"PhimoeSparseMoeBlock"}
# In one process, each class is read once for all of these tests.
pytestmark = [pytest.mark.xdist_group("reading transformers"), thorough]


def readings(op: str) -> dict[str, Reading]:
    """The readings of every class of *op* that can be made by itself, by the name of the class."""
    found = {}
    for each in classes(CENSUS):
        if each.op == op and (module := made(each)) is not None:
            found[each.name] = read(type(module).forward, module)
    return found


def made(each: Class) -> Any:
    try:
        return instance(each)
    except Exception:
        return None


@functools.lru_cache
def of_op(op: str) -> dict[str, Reading]:
    return readings(op)


@pytest.mark.parametrize("op", OPS)
def test_nearly_every_class_is_made(op):
    assert len(of_op(op)) >= 0.95 * len([each for each in classes(CENSUS) if each.op == op])


@pytest.mark.parametrize("op", OPS)
def test_all_of_it_is_read_and_nothing_in_it_has_effects(op):
    found = of_op(op)
    assert {name: each.unread for name, each in found.items() if each.unread and name not in NOT_READ} == {}
    assert {name: each.side_effects for name, each in found.items() if each.side_effects} == {}


@pytest.mark.parametrize("op", OPS)
def test_every_class_computes_with_something_that_it_has(op):
    assert [name for name, each in of_op(op).items() if not each.reads and "Unweighted" not in name] == []


def test_norms_draw_no_random_numbers():
    assert {name for name, each in of_op("rmsnorm").items() if each.draws} == set()


def rotary() -> list[tuple[str, Callable[..., Any]]]:
    found = []
    for folder, name in CENSUS.classes["rope"]:
        module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        found.append((f"{folder}.{name}", functools.reduce(getattr, name.split("."), module)))
    return found


def test_rotary_functions_are_read_and_only_compute():
    found = {name: read(function) for name, function in rotary()}
    assert {name: each.unread for name, each in found.items() if each.unread and name not in NOT_READ} == {}
    assert {name for name, each in found.items() if each.side_effects or each.draws} == set()
