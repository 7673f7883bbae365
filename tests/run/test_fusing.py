"""Which models a process fuses, when, and what it logs about them."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from support import kernels
from support.managers import manager_of
from support.models import Toy, inputs
from torch import nn

from fuseplug import RejectedError
from fuseplug.interface import KernelPlugin
from fuseplug_tools.fusing import moments
from fuseplug_tools.fusing.fusing import Fusing
from fuseplug_tools.run.options import ACCELERATE, FSDP1, LLAMA_FACTORY, TRANSFORMERS, RunOptions

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(autouse=True)
def said():
    """The log: levels and messages."""
    lines = []

    class Listing(logging.Handler):
        def emit(self, record):
            lines.append((record.levelname, record.getMessage()))

    handler = Listing()
    log = logging.getLogger("fuseplug")
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.fixture
def manager():
    return manager_of(kernels.NormKernel)


@pytest.fixture
def make(manager):
    return lambda **options: Fusing(RunOptions(**options), manager)


@pytest.fixture
def fusing(make):
    return make()


def is_fused(manager, model):
    return manager.applied_to(model) is not None


def hooks(model):
    return sum(len(each._forward_pre_hooks) for each in model.modules())


def test_a_model_is_fused_once_and_said_once(fusing, manager, said):
    model = Toy()
    for _ in range(2):
        fusing.fuse(model)
    fusing.fuse(model.layers[0])
    fusing.fuse(Toy())
    assert is_fused(manager, model)
    ((level, line),) = said
    assert level == "INFO"
    assert line.startswith("Toy: 5 of 5 targets fused for training on cpu; ")


def test_what_the_report_notes_is_said_with_it(make, said):
    make(allow=("lazy",)).fuse(Toy())
    ((_, line),) = said
    assert line.endswith(" s; note: allow='lazy': no kernel asked for that")


def test_what_is_not_trained_is_left_alone(fusing, manager, said):
    model = Toy().requires_grad_(False)
    fusing.fuse(model)
    assert not is_fused(manager, model)
    assert said == []
    model.layers[0].requires_grad_(True)  # like an adapter of PEFT
    fusing.fuse(model)
    assert len(manager.applied_to(model).report.fused) == 5


def test_what_the_users_own_code_has_fused_stays_as_it_is(fusing, manager, said):
    model = Toy()
    fusing.watch(model)
    assert len(manager.apply_all(model, skip="layers.0").report.fused) == 3
    model(inputs())
    assert len(manager.applied_to(model).report.fused) == 3
    assert (hooks(model), said) == (0, [])


def test_a_watched_model_is_fused_when_its_training_begins(fusing, manager):
    model, want = Toy(), Toy()(inputs())
    fusing.watch(model)
    fusing.watch(model.layers)
    assert hooks(model) == 2
    with torch.no_grad():
        model(inputs())
    model.requires_grad_(False)(inputs())
    assert not is_fused(manager, model)
    torch.testing.assert_close(model.requires_grad_(True)(inputs()), want)
    assert sum(each.fused for each in manager.applied_to(model).calls()) == 5
    assert hooks(model) == 0


def test_a_served_model_is_fused_when_it_is_called_without_gradients(make, manager, said):
    model, want, fusing = Toy().requires_grad_(False), Toy()(inputs()), make(mode="inference")
    fusing.watch(model)
    model(inputs())
    assert not is_fused(manager, model)
    with torch.inference_mode():
        torch.testing.assert_close(model(inputs()), want)
    assert sum(each.fused for each in manager.applied_to(model).calls()) == 5
    assert hooks(model) == 0
    ((_, line),) = said
    assert line.startswith("Toy: 5 of 5 targets fused for inference on cpu; ")


@pytest.mark.parametrize(("mode", "count"), [("training", 0), ("inference", 5)])
def test_a_kernel_without_a_derivative_serves(mode, count):
    kernel = kernels.variant_of(kernels.NormKernel, differentiable=False)
    manager, model = manager_of(kernel), Toy()
    Fusing(RunOptions(mode=mode), manager).fuse(model)
    applied = manager.applied_to(model)
    assert (len(applied.report.fused) if applied else 0) == count


def test_a_part_that_is_called_by_itself_has_the_whole_model_fused(fusing, manager):
    model = Toy()
    for each in (model.layers[0], model, model.layers[1]):
        fusing.watch(each)
    model.layers[0](inputs())
    assert len(manager.applied_to(model).report.fused) == 5
    assert hooks(model) == 0


def test_what_is_on_meta_is_not_trained_yet(fusing, manager):
    model = Toy().to("meta")
    fusing.watch(model)
    model(inputs().to("meta"))
    assert not is_fused(manager, model)
    model.to_empty(device="cpu")(inputs())
    assert is_fused(manager, model)


def test_a_copy_is_a_model_of_its_own(fusing, manager):
    model = Toy()
    fusing.watch(model)
    trained, reference = copy.deepcopy(model), copy.deepcopy(model).requires_grad_(False)
    trained(inputs())
    reference(inputs())
    assert [is_fused(manager, each) for each in (trained, reference, model)] == [True, False, False]


def test_a_pickle_needs_no_fuseplug(fusing, tmp_path):
    layer = nn.Linear(2, 2)
    fusing.watch(layer)
    path = tmp_path / "layer.pickle"
    path.write_bytes(pickle.dumps(layer))
    code = (
        "import pickle, sys, torch; sys.modules['fuseplug'] = None\n"
        f"layer = pickle.load(open({str(path)!r}, 'rb'))\nassert layer(torch.ones(1, 2)).shape == (1, 2)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tracers_and_compilers_see_no_training(fusing, manager):
    model = Toy()
    fusing.watch(model)
    torch.jit.trace(model, inputs(), check_trace=False)
    assert not is_fused(manager, model)


@pytest.mark.parametrize(("kernel", "zero3", "lines"), [("Attention", 1, 2), ("Attention", 0, 1), ("Norm", 1, 1)])
def test_what_zero3_hooks_is_named_as_leaves(monkeypatch, said, kernel, zero3, lines):
    integration = SimpleNamespace(is_deepspeed_zero3_enabled=lambda: bool(zero3))
    monkeypatch.setitem(sys.modules, "transformers.integrations.deepspeed", integration)
    manager = manager_of(getattr(kernels, f"{kernel}Kernel"))
    Fusing(RunOptions(), manager).fuse(Toy())
    assert len(said) == lines
    assert ("set ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES=Attention, or call" in said[-1][1]) is (lines == 2)


def test_dry_run_changes_nothing(make, manager, said, tmp_path):
    model, report = Toy(), tmp_path / "report.json"
    make(dry_run=True, report=str(report)).fuse(model)
    assert not is_fused(manager, model)
    assert said[0][1].startswith("dry run, nothing is changed: Toy: 5 of 5 ")
    (found,) = json.loads(report.read_text())
    assert (found["applied"], found["fused"]) == (False, 5)


def test_a_report_is_added_for_each_distinct_model(make, tmp_path):
    report = tmp_path / "report.json"
    fusing = make(report=str(report), only=("*",))
    for model in (Toy(), Toy(), Toy().layers[0]):
        fusing.fuse(model)
    assert [(each["applied"], each["model"]) for each in json.loads(report.read_text())] == [
        (True, "Toy"),
        (True, "Block"),
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_the_calls_are_added_when_the_process_ends(make, manager, tmp_path):
    report = tmp_path / "report.json"
    fusing = make(report=str(report), skip=("layers.1*",))
    one, two = Toy(), Toy()
    for model in (one, two, two.layers[0]):
        fusing.fuse(model)
    assert [each["calls"] for each in json.loads(report.read_text())] == [None]
    for model in (one, two, two):
        model(inputs())
    manager.undo(two)
    two(inputs())
    del one, two, model
    fusing.ended()
    (found,) = json.loads(report.read_text())
    assert found["calls"] == [
        {"paths": [path], "target": "forward", "kernel": "toy_norm", "fused": 3, "original": 0}
        for path in ("layers.0.norm1", "layers.0.norm2", "norm")
    ]


def test_a_fork_and_a_dry_run_have_no_calls(make, tmp_path, monkeypatch):
    report = tmp_path / "report.json"
    fusing, dry = make(report=str(report)), make(report=str(report), dry_run=True)
    for each in (fusing, dry):
        each.fuse(Toy())
    monkeypatch.setattr("os.getpid", lambda: -1)
    fusing.ended()
    monkeypatch.undo()
    dry.ended()
    assert [each["calls"] for each in json.loads(report.read_text())] == [None, []]


def test_a_report_that_can_no_longer_be_written_ends_no_process(make, said, tmp_path):
    report = tmp_path / "report.json"
    fusing = make(report=str(report))
    fusing.fuse(Toy())
    report.unlink()
    fusing.ended()
    assert not report.exists()
    report.mkdir()
    fusing.ended()
    assert said[-1] == ("WARNING", f"--report {report}: the calls cannot be written: Is a directory")


@pytest.mark.parametrize("options", [{"only": ("nowhere",)}, {"include": ("nothing",)}])
def test_what_goes_wrong_leaves_the_training_as_it_is(make, manager, said, options):
    model = Toy()
    fusing = make(**options)
    fusing.watch(model)
    for _ in range(2):
        model(inputs())
    assert not is_fused(manager, model)
    ((level, line),) = said
    assert level == "WARNING"
    assert line.startswith("Toy is trained unfused on rank 0, because of this: ")
    with pytest.raises(Exception, match="no"):
        make(strict=True, **options).fuse(Toy())


def test_strict_is_that_of_the_plan(make):
    model = Toy()
    model.layers[0].norm1.forward = lambda x: x
    with pytest.raises(RejectedError, match="had to be left alone"):
        make(strict=True).fuse(model)


class Accelerator:
    device = torch.device("cpu")

    def prepare(self, *args, device_placement=None):
        """Prepare."""
        return args

    def prepare_model(self, model, device_placement=None, evaluation_mode=False):
        return model


@pytest.fixture
def used_by_moments(monkeypatch):
    """Give the wrapped functions a `Fusing`, with accelerate not in use, because an earlier test may have used it."""

    def use(fusing):
        monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(is_initialized=lambda: False))
        monkeypatch.setattr("fuseplug_tools.fusing.process.fusing", lambda: fusing)
        return fusing

    return use


@pytest.fixture
def used(used_by_moments, fusing):
    return used_by_moments(fusing)


@pytest.fixture
def transformers(monkeypatch):
    """Wrap the functions that are wrapped once transformers is imported, and return its model class."""
    monkeypatch.setattr(nn.DataParallel, "__init__", nn.DataParallel.__init__)
    monkeypatch.setattr(torch, "compile", torch.compile)

    def wrapped():
        model_class = type("PreTrainedModel", (Toy,), {})
        moments.wrap(TRANSFORMERS, SimpleNamespace(PreTrainedModel=model_class))
        return model_class

    return wrapped


def test_accelerate_prepares_fused_models(used, manager, monkeypatch):
    wrapped = type("Accelerator", (Accelerator,), dict(vars(Accelerator)))
    moments.wrap(ACCELERATE, SimpleNamespace(Accelerator=wrapped))
    assert wrapped.prepare.__doc__ == "Prepare."
    one, two, reference, last = Toy(), Toy(), Toy(), Toy()
    accelerator = wrapped()
    assert accelerator.prepare(one, "other", two) == (one, "other", two)
    assert accelerator.prepare_model(reference, evaluation_mode=True) is reference
    accelerator.prepare_model(reference, None, True)
    assert accelerator.prepare_model(model=last) is last
    assert [is_fused(manager, each) for each in (one, two, reference, last)] == [True, True, False, True]


def test_for_inference_models_are_fused_that_are_prepared_for_evaluation_or_compiled(
    used_by_moments, make, manager, transformers
):
    used_by_moments(make(mode="inference"))
    wrapped = type("Accelerator", (Accelerator,), dict(vars(Accelerator)))
    moments.wrap(ACCELERATE, SimpleNamespace(Accelerator=wrapped))
    prepared, compiled = Toy().requires_grad_(False), transformers()().requires_grad_(False)
    wrapped().prepare_model(prepared, evaluation_mode=True)
    with torch.no_grad():
        torch.compile(compiled.forward)
    assert [is_fused(manager, each) for each in (prepared, compiled)] == [True, True]


@pytest.mark.parametrize(
    ("options", "chosen", "used"),
    [
        ({}, None, "other"),
        ({}, "auto", "other"),
        ({}, "toy_norm , ", "toy_norm"),
        ({"include": ("other",)}, "toy_norm", "other"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "fuseplug"])
def test_the_kernel_config_of_llama_factory_chooses_among_our_kernels(
    used_by_moments, make, said, name, options, chosen, used
):
    class Registry(KernelPlugin):  # of the same form as LLaMA-Factory's
        _functions: ClassVar = {"auto": lambda **_: pytest.fail("LLaMA-Factory's own kernels were applied")}

    manager = manager_of(kernels.NormKernel, kernels.variant_of(kernels.NormKernel, kernel_id="other", priority=9))
    fusing = used_by_moments(Fusing(RunOptions(**options), manager))
    moments.wrap(LLAMA_FACTORY, SimpleNamespace(KernelPlugin=Registry))
    whole, other = Toy(), Toy()
    assert Registry(name)(model=whole.layers, include_kernels=chosen) is whole.layers
    assert not is_fused(manager, whole)
    for model, kernel_id in ((whole, used), (other, "other")):
        fusing.fuse(model)
        assert {entry.kernel_id for entry in manager.applied_to(model).report.fused} == {kernel_id}
    assert said[0][1].startswith("LLaMA-Factory's kernel_config chooses Fuseplug's kernels, and")


@pytest.mark.parametrize("initialised", [False, True])
def test_fsdp1_wraps_fused_models_unless_accelerate_is_in_use(used, manager, monkeypatch, initialised):
    class FullyShardedDataParallel:
        def __init__(self, module, group=None, device_id=None):
            self.module = module

    monkeypatch.setitem(sys.modules, "accelerate.state", SimpleNamespace(is_initialized=lambda: initialised))
    moments.wrap(FSDP1, SimpleNamespace(FullyShardedDataParallel=FullyShardedDataParallel))
    model = Toy()
    used.watch(model)
    FullyShardedDataParallel(model.layers[0], device_id=torch.device("cpu"))
    assert is_fused(manager, model) is not initialised


def test_models_of_transformers_are_watched_once_they_are_made(used, manager, transformers):
    PreTrainedModel = transformers()
    model, parallel, other = PreTrainedModel(), PreTrainedModel(), Toy()
    nn.DataParallel(parallel)
    nn.DataParallel(other)
    assert [is_fused(manager, each) for each in (model, parallel, other)] == [False, True, False]
    model(inputs())
    assert is_fused(manager, model)
    compiled, called, inferring = PreTrainedModel(), PreTrainedModel(), PreTrainedModel()
    torch.compile(nn.Sequential(compiled))
    called.layers[0].compile()
    torch.compile(other)
    torch.compile(lambda x: x)
    assert torch.compile(dynamic=True)(len) is not None
    with torch.no_grad():
        torch.compile(inferring)
    assert [is_fused(manager, each) for each in (compiled, called, other, inferring)] == [True, True, False, False]


@pytest.mark.thorough
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_model_is_fused_before_it_is_traced(used, manager, transformers, fullgraph):
    PreTrainedModel = transformers()
    model, want = PreTrainedModel(), Toy()(inputs())
    torch.export.export(model, (inputs(),))
    assert not is_fused(manager, model)
    torch.testing.assert_close(torch.compile(model, fullgraph=fullgraph)(inputs()), want)
    assert is_fused(manager, model)


def test_a_process_that_trained_nothing_says_so_when_it_ends(fusing, said):
    model = Toy()
    fusing.ended()
    assert said == []
    fusing.watch(model)
    fusing.ended()
    untrained = 'no model was trained ("--mode inference" fuses models that are only called)'
    assert said == [("INFO", f"nothing was fused: {untrained}; models that were made: Toy")]
    said.clear()
    model(inputs())
    fusing.watch(Toy())
    fusing.ended()
    assert ["nothing was fused" in line for _, line in said] == [False]


def test_a_process_that_served_nothing_says_so_when_it_ends(make, said):
    fusing, model = make(mode="inference"), Toy()
    fusing.watch(model)
    model(inputs())
    fusing.ended()
    why = "no model in memory was called without gradients, outside of a compiler"
    assert said == [("INFO", f"nothing was fused: {why}; models that were made: Toy")]


class TestFirstCalls:
    @pytest.fixture
    def warned(self, caplog):
        return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    def trained(self, model, steps):
        for _ in range(steps):
            model(inputs()).sum().backward()

    def test_a_kernel_that_is_not_reached_is_said_once_after_ten(self, fusing, warned):
        model = Toy()
        fusing.fuse(model)
        del model.layers[0].norm1.forward  # somebody takes the replacement off
        self.trained(model, 9)
        assert warned() == []
        self.trained(model, 11)
        (line,) = warned()
        assert line.startswith("1 of 5 fused targets are not in use:\n  layers.0.norm1.forward: ")

    def test_calls_that_are_too_small_to_gain_are_said_in_the_end(self, monkeypatch, said):
        monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
        kernel = kernels.variant_of(kernels.NormKernel, gains_from=lambda *_: 1_000_000)
        model, fusing = Toy(), Fusing(RunOptions(), manager_of(kernel))
        fusing.fuse(model)
        self.trained(model, 12)
        fusing.ended()
        assert [line for _, line in said][1:] == ["5 of 5 fused targets had no call large enough to gain"]

    def test_where_all_are_reached_nothing_is_said(self, fusing, warned):
        model = Toy()
        fusing.fuse(model)
        self.trained(model, 25)
        assert warned() == []
