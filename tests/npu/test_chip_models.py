"""Models whose calls CANN would refuse as they come are fused on each chip, and compute what they did on the CPU."""

import pytest
import torch
import transformers
from support.thorough import first_quick
from support.tiny import BASE, EXPERTS, HEAD, exists, step

from fuseplug import KernelManager
from fuseplug_backends.npu import here
from fuseplug_host_npu import ContractError, HostNPU
from fuseplug_rope.backends.npu import layouts

pytestmark = pytest.mark.usefixtures("small_checks")

CHIPS = ("Ascend910B3", "Ascend950PR_9599")
MODELS = {
    # Norms of heads give contiguous heads: StableLM's by a cat, Gemma3's because operations on an NPU do.
    "stablelm": BASE
    | {"hidden_size": 80, "num_attention_heads": 4, "qk_layernorm": True, "partial_rotary_factor": 0.5},
    # Half a row of 20 is no multiple of 32 bytes, so CANN refuses even few heads.
    "gemma3_text": BASE | {"head_dim": 20, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "qwen3": BASE | HEAD,
    "gpt_oss": BASE | HEAD | EXPERTS | {"sliding_window": 8},
}
KERNELS = "npu_fused_rmsnorm,npu_fused_swiglu,npu_fused_rope,npu_fused_moe"


def build(model_type):
    if not exists(model_type):
        pytest.skip("not in this version of transformers")
    if model_type == "stablelm" and transformers.__version__.startswith("4."):
        pytest.skip("this version of transformers initialises a bias that the norms of its heads do not have")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def manager():
    return KernelManager(environ={"FUSEPLUG_KERNELS": KERNELS})


def assert_step(model, manager, expected):
    """Assert that the fused model's forward and backward are what they were, and return the report."""
    applied = manager.apply_all(model)
    assert {entry.check for entry in applied.report.fused} == {"passed"}, applied.report
    found = step(model)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5 + 1e-4 * value.abs().max().item(), msg=name)
    return applied.report


@pytest.mark.parametrize("soc", first_quick(CHIPS))
@pytest.mark.parametrize("model_type", first_quick([name for name in MODELS if name != "gpt_oss"], 2))
def test_no_call_is_refused(host_npu, manager, model_type, soc):
    model = build(model_type)
    expected = step(model)
    with HostNPU(soc=soc) as chip:
        report = assert_step(model.to("npu"), manager, expected)
        assert "npu_fused_rope" in {entry.kernel_id for entry in report.fused}
        assert chip.calls["npu_rotary_mul"]


@pytest.mark.parametrize("model_type", first_quick(["stablelm", "gemma3_text"]))
def test_calls_as_they_come_would_be_refused(host_npu, manager, monkeypatch, model_type):
    """With the layout that was passed before, where the tables have the sequence alone."""
    own, refused = layouts._find, []

    def apart(sizes, strides, table, differ, mode):
        found = own(sizes, strides, table, differ, mode)
        alone = len(sizes) == 3 and differ == (False, False, True) and min(sizes) > 1
        if alone and layouts._order_of_memory(sizes, strides) == [0, 1, 2]:
            refused.append(sizes)
            return layouts._layout([[0], [1], [2]], [False, False, True], sizes, table)
        return found

    model = build(model_type).to("npu")
    applied = manager.apply_all(model)
    monkeypatch.setattr(layouts, "_remembered", apart)
    with pytest.raises(ContractError, match="CheckBnsdBlockSkip"):
        step(model)
    assert refused
    applied.undo()


@pytest.mark.parametrize("lacking", first_quick([True, False]))
def test_gpt_oss_is_fused_whether_or_not_cann_clips(host_npu, manager, monkeypatch, lacking):
    monkeypatch.delitem(here._KNOWN, "npu_clipped_swiglu")
    model = build("gpt_oss")
    expected = step(model)
    with HostNPU(lacking={"npu_clipped_swiglu"} if lacking else ()) as chip:
        report = assert_step(model.to("npu"), manager, expected)
        assert "npu_fused_moe" in {entry.kernel_id for entry in report.fused}
        assert chip.calls["npu_grouped_matmul"]
        assert bool(chip.calls["npu_clipped_swiglu"]) == (not lacking)
