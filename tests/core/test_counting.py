"""A target's calls are counted for its module, from when it was fused, and every handle gives the same counts."""

import copy
import gc

import pytest
import torch
from support.kernels import GateKernel, NormKernel, RotaryKernel
from support.managers import manager_of
from support.models import Block, Toy, inputs

pytestmark = pytest.mark.usefixtures("checked_once")

ROTATIONS = ["layers.0.attention", "layers.1.attention"]


@pytest.fixture
def fusing():
    return manager_of(NormKernel, RotaryKernel, GateKernel)


def told(applied, op="apply_rotary"):
    """How many calls of a function the kernel and the original computed, by path."""
    return {each.paths[0]: (each.fused, each.original) for each in applied.calls() if each.target.function == op}


def test_every_handle_gives_the_same(fusing, model):
    applied = fusing.apply_all(model)
    for _ in range(3):
        model(inputs())
    other = fusing.applied_to(model)
    assert other.calls() == applied.calls()
    assert {each.fused for each in other.calls()} == {3}
    assert other.check_in_use(1) == []


def test_handles_of_one_model_look_together(fusing, model):
    fusing.apply_all(model)
    model.half()
    for _ in range(2):
        model(inputs(dtype=torch.float16))
        assert fusing.applied_to(model).check_in_use(3) == []
    model(inputs(dtype=torch.float16))
    assert fusing.applied_to(model).check_in_use(3)


def test_a_handle_has_what_every_call_put_on(fusing, model):
    fusing.apply("toy_norm", model)
    fusing.apply("toy_rotary", model)
    model(inputs())
    assert {each.kernel_id: each.fused for each in fusing.applied_to(model).calls()} == {"toy_norm": 1, "toy_rotary": 1}


def test_functions_are_counted_for_each_module_of_each_model(fusing):
    called, idle = Toy(), Toy()
    of_called, of_idle = fusing.apply_all(called), fusing.apply_all(idle)
    for _ in range(2):
        called(inputs())
    assert told(of_called) == told(of_called, "apply_gate") == dict.fromkeys(ROTATIONS, (2, 0))
    assert told(of_idle) == told(of_idle, "apply_gate") == dict.fromkeys(ROTATIONS, (0, 0))


def test_those_of_the_original_too(fusing, model):
    applied = fusing.apply_all(model)
    model.layers[1].double()
    x = model.layers[0](inputs())
    model.layers[1](x.double())
    assert told(applied) == {ROTATIONS[0]: (1, 0), ROTATIONS[1]: (0, 1)}


def test_a_copy_is_counted_for_itself(fusing, model):
    applied = fusing.apply_all(model)
    model(inputs())
    duplicate = copy.deepcopy(model)
    for _ in range(2):
        duplicate(inputs())
    of_copy = fusing.applied_to(duplicate)
    assert {each.fused for each in applied.calls()} == {1}
    assert len(of_copy.calls()) == len(applied.calls())
    assert {each.fused for each in of_copy.calls()} == {2}
    assert of_copy.check_in_use(1) == []
    fusing.undo(duplicate)
    assert fusing.applied_to(duplicate) is None


def test_a_module_with_the_number_of_one_that_is_gone_is_counted_anew(fusing):
    for _ in range(8):
        model = copy.deepcopy(fused_once(fusing))
        model(inputs())
        assert {each.fused for each in fusing.applied_to(model).calls()} == {1}
        del model
        gc.collect(1)  # the model is young, and a full collection would take a second


def fused_once(fusing):
    model = Block()
    fusing.apply_all(model)
    return model


def test_a_trial_names_the_function_of_a_layer_that_was_not_reached(fusing, model):
    applied = fusing.apply_all(model)
    model.forward = lambda x: model.norm(model.layers[0](x))
    tried = applied.try_(inputs())
    assert len(tried) == len(applied.report.fused)
    assert {(each.paths[0], str(each.target)) for each in tried.not_reached} == {
        ("layers.1.norm1", "forward"),
        ("layers.1.norm2", "forward"),
        ("layers.1.attention", "forward:apply_rotary"),
        ("layers.1.attention", "forward:apply_gate"),
    }
    assert str(tried).startswith(f"{len(tried) - 4} of {len(tried)} targets always came to their kernels\n")
    assert "layers.1.attention.forward:apply_rotary: not called" in str(tried)


def test_threads_do_not_take_each_others_calls(fusing):
    import threading

    models = [Toy(), Toy()]
    handles = [fusing.apply_all(each) for each in models]

    def run(model, times):
        for _ in range(times):
            model(inputs())

    threads = [threading.Thread(target=run, args=(each, 20 + 5 * number)) for number, each in enumerate(models)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [set(told(each).values()) for each in handles] == [{(20, 0)}, {(25, 0)}]


def test_a_method_with_functions_compiles_without_a_break(fusing, model):
    torch.compiler.reset()
    from support.kernels import variant_of

    quiet = manager_of(variant_of(RotaryKernel, function="support.kernels:quiet_rotary"))
    want = model(inputs())
    quiet.apply_all(model)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(inputs()), want)
