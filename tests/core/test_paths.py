"""Kernels whose answer depends on where a module is."""

from __future__ import annotations

import pytest
import torch
from support.kernels import NormKernel, variant_of
from support.models import Toy, inputs

from fuseplug import Rejection
from fuseplug.kernel_faults import faults


def fused(applied):
    return sorted((path, entry.kernel_id) for entry in applied.report.fused for path in entry.paths)


@pytest.fixture
def norms(model):
    """The paths of the norms of the model, all of which are alike."""
    return [path for path, module in model.named_modules() if type(module).__name__ == "Norm"]


def last_only(self, site):
    self.asked.append(site.paths)
    return NormKernel.match(self, site) if site.paths == ("norm",) else None


def test_only_the_last_layer(manager, model, norms):
    kernel = variant_of(NormKernel, "last", match=last_only, asked=[], depends_on_path=True)
    manager.register(kernel)
    want = model(inputs())
    applied = manager.apply_all(model)
    assert fused(applied) == [("norm", "last")]
    asked = [path for paths in kernel.asked for path in paths]
    assert len(norms) > 2
    assert set(norms) < set(asked)
    assert len(asked) == len(set(asked)) == len(kernel.asked) == len(list(model.modules()))
    torch.testing.assert_close(model(inputs()), want)


def test_without_it_a_kernel_is_asked_once_and_told_all_paths(manager, model, norms):
    kernel = variant_of(NormKernel, "all", match=lambda self, site: self.asked.append(site), asked=[])
    manager.register(kernel)
    manager.apply_all(model)
    (site,) = [site for site in kernel.asked if type(site.module).__name__ == "Norm"]
    assert site.paths == tuple(norms)
    assert site.path == norms[0]


def test_beside_kernels_that_do_not_mind(manager, model, norms):
    """The others are asked as before, and take what is left."""
    mind = {"match": last_only, "depends_on_path": True, "asked": [], "priority": 1}
    manager.register(variant_of(NormKernel, "last", **mind))
    manager.register(NormKernel)
    applied = manager.apply_all(model)
    assert fused(applied) == sorted((path, "last" if path == "norm" else "toy_norm") for path in norms)
    (entry,) = [entry for entry in applied.report.fused if entry.kernel_id == "last"]
    assert entry.outranked == ("toy_norm",)


def test_a_rejection_is_of_one_module(manager, model, norms):
    def match(self, site):
        return Rejection("not here") if site.path == norms[1] else None

    manager.register(variant_of(NormKernel, "choosy", match=match, depends_on_path=True))
    manager.register(NormKernel)
    entries = {entry.paths[0]: entry for entry in manager.apply_all(model).report.entries}
    assert entries[norms[1]].kernel_id == "toy_norm"
    assert [path for path, entry in entries.items() if entry.rejections] == [norms[1]]


def test_a_module_that_is_in_the_model_twice_has_two_paths(manager):
    model = Toy().eval()
    model.again = model.norm
    kernel = variant_of(NormKernel, "last", match=last_only, asked=[], depends_on_path=True)
    manager.register(kernel)
    assert fused(manager.apply_all(model)) == []
    assert ("norm", "again") in kernel.asked


def test_is_true_or_false():
    assert "depends_on_path must be True or False, not 1" in faults(variant_of(NormKernel, depends_on_path=1))
