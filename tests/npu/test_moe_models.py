"""What transformers has, recognised by behaviour, fused on the NPU, against the untouched model on the CPU."""

from __future__ import annotations

import pytest
import torch
from support.sparse import ROWS, build, entries, step
from support.thorough import first_quick

from fuseplug import KernelManager
from fuseplug_moe.kernels import NpuFusedMoEKernel

from .mixtures import FUSED, npu_ops


class TestModels:
    """What transformers has, recognised by behaviour, fused on the NPU, against the untouched model on the CPU."""

    @pytest.fixture
    def manager(self):
        return KernelManager(environ={"FUSEPLUG_KERNELS": NpuFusedMoEKernel.kernel_id})

    FOUND = [row for row in ROWS if row[2]]  # noqa: RUF012 - only read

    @pytest.mark.parametrize(("model_type", "config", "variant"), first_quick(FOUND, 4), ids=[row[0] for row in FOUND])
    def test_computes_the_same_and_comes_back(self, host_npu, manager, model_type, config, variant):
        model = build(model_type, config)
        expected = step(model)
        model.to("npu")
        before = step(model)
        applied = manager.apply_all(model)
        fused = [entry for entry in entries(applied.report) if entry.fused]
        assert {entry.variant for entry in fused} == {variant}, applied.report
        assert {entry.check for entry in fused} == {"passed"}
        host_npu.calls.clear()
        found = step(model)
        assert npu_ops(host_npu.calls) >= FUSED
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            atol = 1e-6 + 2e-5 * value.abs().max().item()
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=atol, msg=name)
        applied.undo()
        after = step(model)
        assert all(torch.equal(after[name], value) for name, value in before.items())

    def test_is_planned_where_there_is_none(self, host_npu, manager):
        planned = manager.plan(build("mixtral", {}).to("meta"), device="npu").report
        assert {(entry.kernel_id, entry.check) for entry in planned.fused} == {("npu_fused_moe", "pending")}
