"""A long plan shows how far it has come, but only on a terminal."""

import contextlib
import io
import time

import pytest
import torch
from support.kernels import NormKernel
from support.managers import manager_of
from support.models import Norm
from torch import nn

from fuseplug import BaseKernel, planning


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Idle(BaseKernel):
    kernel_id = op = "idle"
    function = reference = "torch:relu"

    def match(self, site):
        return None


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("fuseplug.planning.progress.PATIENCE", 0.01)


@pytest.fixture
def plan(monkeypatch):
    """Plan four modules, each of which takes the given number of seconds to decide."""
    decide = planning.Decider.decide

    def run(seconds):
        def slowly(self, place):
            time.sleep(seconds)
            return decide(self, place)

        monkeypatch.setattr(planning.Decider, "decide", slowly)
        return manager_of(Idle).plan(nn.Sequential(nn.ReLU(), nn.Sequential(nn.SiLU())))

    return run


def test_a_long_plan_shows_where_it_is_and_wipes_it_out(plan, impatient):
    with contextlib.redirect_stderr(Terminal()) as stderr:
        plan(0.2)
    said = stderr.getvalue()
    assert "checking kernels" in said
    assert "1/4" in said
    assert "\x1b[2K" in said.rpartition("checking kernels")[2]  # the line is erased


def test_a_short_plan_shows_nothing(plan):
    with contextlib.redirect_stderr(Terminal()) as stderr:
        plan(0)
    assert stderr.getvalue() == ""


@pytest.mark.parametrize(("kind", "rank"), [(io.StringIO, "0"), (Terminal, "1")])
def test_nothing_is_shown_elsewhere_than_on_the_terminal_of_the_first_process(plan, impatient, monkeypatch, kind, rank):
    monkeypatch.setenv("RANK", rank)
    with contextlib.redirect_stderr(kind()) as stderr:
        plan(0.1)
    assert stderr.getvalue() == ""


def test_what_is_measured_is_announced(impatient, monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
    batches = [{"hidden_states": torch.ones(rows, 16)} for rows in (4, 8)]
    with contextlib.redirect_stderr(Terminal()) as stderr:
        manager_of(NormKernel).plan(Norm(), measure=batches)
    said = stderr.getvalue()
    assert "timing 2 calls, about 2 s at most, compilers aside:" in said
    assert "1/2" in said
    assert "the model.forward" in said


def test_what_is_shown_ends_where_planning_fails(impatient, monkeypatch):
    def fails(self, place):
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr(planning.Decider, "decide", fails)
    with contextlib.redirect_stderr(Terminal()) as stderr:
        with pytest.raises(KeyboardInterrupt):
            manager_of(Idle).plan(nn.ReLU())
        said = stderr.getvalue()
        time.sleep(0.3)
    assert "checking kernels" in said
    assert stderr.getvalue() == said
