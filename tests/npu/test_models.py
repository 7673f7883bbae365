"""Whole models on an NPU with every NPU kernel at once compute and learn what they did on the CPU."""

import copy
import itertools

import pytest
import torch
from support.thorough import covering, first_quick, quick_if
from support.tiny import TINY, build, exists, inputs, step

from fuseplug import KernelManager

pytestmark = pytest.mark.usefixtures("small_checks")

KERNELS = ("npu_fused_rmsnorm", "npu_fused_swiglu", "npu_fused_rope", "npu_fused_moe")
MODELS = [
    pytest.param(name, marks=() if exists(name) else pytest.mark.skip(reason="not in this version of transformers"))
    for name in TINY
]
FEW = ("gemma3_text", "gpt_oss")
"""One model with gates and other norms, and one with experts."""

LEFT_ALONE = {"cohere": {"CohereLayerNorm"}}
"""What no kernel fuses: a norm that subtracts the mean."""

ROUNDINGS = {torch.float32: 16, torch.bfloat16: 4}
"""How far a result may be from where it should be, in roundings, as a share of its size."""


@pytest.fixture
def manager():
    manager = KernelManager(environ={"FUSEPLUG_KERNELS": ",".join(KERNELS)})
    assert {record.kernel_id for record in manager.kernels() if record.state == "ready"} == {*KERNELS}
    return manager


def few(model, dtype=None):
    """What must occur of a model and a dtype: the models of `FEW`, with the dtypes in turns."""
    return [model, dtype] if model in FEW else []


@pytest.mark.parametrize(
    ("name", "dtype"),
    covering(
        [
            pytest.param(*model.values, dtype, marks=model.marks)
            for model, dtype in itertools.product(MODELS, ROUNDINGS)
        ],
        by=few,
    ),
    ids=str,
)
def test_logits_and_gradients_are_those_of_the_unfused_model(host_npu, manager, name, dtype):
    model = build(name, dtype)
    unfused = step(model)
    truth = step(copy.deepcopy(model).to(torch.float32 if dtype is torch.bfloat16 else finest(name)))
    model.to("npu")
    before = step(model)
    with manager.apply_all(model) as applied:
        host_npu.calls.clear()
        fused = step(model)
    assert_fused_by_npu_kernels(name, applied.report)
    kernels = {record.kernel_id: record.kernel for record in manager.kernels()}
    for kernel_id in {entry.kernel_id for entry in applied.report.fused}:
        assert any(host_npu.calls[op] for op in kernels[kernel_id].ops), kernel_id
    assert fused.keys() == unfused.keys()
    for key, expected in unfused.items():
        assert (fused[key].dtype, fused[key].shape) == (expected.dtype, expected.shape)
        allowed = 2 * distance(expected, truth[key]) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        assert distance(fused[key], truth[key]) <= allowed, key
    after = step(model)
    assert all(torch.equal(before[key], after[key]) for key in before)


def finest(name):
    """The dtype for the truth about a float32 model: float64; with experts float32, as grouped matmuls lack float64."""
    return torch.float32 if "num_local_experts" in TINY[name] else torch.float64


def assert_fused_by_npu_kernels(name, report):
    assert report.fused
    for entry in report.fused:
        assert (entry.kernel_id.startswith("npu_fused_"), entry.check) == (True, "passed"), report
    left_alone = {entry.class_name for entry in report.left_alone if not entry.covered_by}
    assert left_alone == LEFT_ALONE.get(name, set()), report


@pytest.mark.parametrize("name", quick_if(MODELS, FEW[:1]))
def test_the_plan_made_without_the_device_is_what_is_done_on_it(host_npu, manager, name):
    there = build(name).to("meta")
    planned = manager.plan(there, device="npu").report
    done = manager.apply_all(build(name).to("npu")).report
    assert [(e.paths, e.target, e.kernel_id, e.variant) for e in planned.entries] == [
        (e.paths, e.target, e.kernel_id, e.variant) for e in done.entries
    ]


@pytest.mark.parametrize("name", first_quick(["qwen3_moe", "qwen3"]))
def test_trained_by_the_trainer_of_transformers(host_npu, manager, name, tmp_path):
    on_cpu = losses(build(name), tmp_path, use_cpu=True)
    model = build(name)
    manager.apply_all(model.to("npu"))
    host_npu.calls.clear()
    on_npu = losses(model, tmp_path, use_cpu=False)
    inner = {"qwen3": "npu_swiglu_backward", "qwen3_moe": "npu_grouped_matmul"}[name]
    for op in ("npu_rms_norm", "npu_rms_norm_backward", "npu_rotary_mul", inner):
        assert host_npu.calls[op]
    assert on_cpu[-1] < on_cpu[0]
    assert on_npu == pytest.approx(on_cpu, rel=1e-4)


def losses(model, directory, *, use_cpu):
    from transformers import Trainer, TrainingArguments

    rows = torch.arange(96).view(8, 12) * 7 % 57 + 3
    arguments = TrainingArguments(
        output_dir=str(directory),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=use_cpu,
        report_to=[],
        save_strategy="no",
        dataloader_pin_memory=False,
        disable_tqdm=True,
        seed=1,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    assert trainer.args.device.type == ("cpu" if use_cpu else "npu")
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_it_writes_what_the_unfused_one_writes(host_npu, manager):
    model = build("qwen3_moe")
    given = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(**inputs(model), **given)
    model.to("npu")
    with manager.apply_all(model, mode="inference"):
        found = model.generate(**{name: value.to("npu") for name, value in inputs(model).items()}, **given)
    assert found.cpu().tolist() == expected.tolist()


PADDED = torch.ones(2, 12, dtype=torch.int64)
PADDED[0, 7:] = 0
AS_TRAINED = {
    "padded": {"attention_mask": PADDED},
    "padded on the left": {"attention_mask": PADDED.flip(1)},
    "packed": {"position_ids": torch.cat((torch.arange(5), torch.arange(7))).expand(2, -1)},
    "a chunk of a sequence": {"position_ids": torch.arange(17, 29).expand(2, -1)},
    "one token, and experts without any": {"input_ids": torch.tensor([[5]])},
}


@pytest.mark.parametrize("name", first_quick(["qwen3_moe", "deepseek_v3"]))
def test_in_the_calls_of_trainers(host_npu, manager, name):
    """Calls with padding, packing, sequence parallelism and few tokens, for which others reported NaN gradients."""
    model = build(name).to("npu")
    expected = {way: step(model, **others) for way, others in AS_TRAINED.items()}
    with manager.apply_all(model) as applied:
        for way, others in AS_TRAINED.items():
            assert_as_it_was(step(model, **others), expected[way], way)
        assert_fused_by_npu_kernels(name, applied.report)
        assert not any(calls.original for calls in applied.calls())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_autocast_gives_is_computed_by_kernels(host_npu, manager, dtype):
    """On chips without bfloat16, mixed precision is float16, and norms of queries and rotations are called in it."""
    model = build("qwen3_moe").to("npu")
    with manager.apply_all(model) as applied, torch.autocast("npu", dtype):
        step(model)
        assert not any(calls.original for calls in applied.calls())


def assert_as_it_was(found, expected, way=""):
    """Compare each tensor relative to its own size."""
    assert found.keys() == expected.keys()
    far = {key: share for key, value in expected.items() if not (share := distance(found[key], value)) < 1e-5}
    assert not far, way


def distance(found, true):
    """How far *found* is from *true*, as a share of the size of *true*."""
    return ((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30)).item()
