"""A kernel that does nothing in the first steps is named once, with the reason, and no call is slower for it."""

import contextlib
import functools
import gc
import logging
import types

import pytest
import torch
from support.kernels import NormKernel, RotaryKernel, ran, variant_of
from support.managers import manager_of
from support.models import Norm, Toy, inputs, tiny_llama
from support.thorough import first_quick

from fuseplug.patching import InUse
from fuseplug.patching.replacement import Replacement

pytestmark = pytest.mark.usefixtures("checked_once")

QUIET = []


@pytest.fixture
def said(caplog):
    """A function that returns the logged messages of a level."""
    caplog.set_level(logging.INFO, logger="fuseplug")
    return lambda level="WARNING": [record.getMessage() for record in caplog.records if record.levelname == level]


def looked(applied, run, steps=3, **options):
    """What a check finds after the last of *steps* calls of *run*; checks after the other calls find nothing."""
    found = []
    for _ in range(steps):
        run()
        found.append(applied.check_in_use(**options))
    assert not any(found[:-1])
    return found[-1]


def test_where_all_kernels_are_reached_nothing_is_said(fusing, model, said):
    applied = fusing.apply_all(model)
    assert looked(applied, lambda: model(inputs())) == QUIET
    assert said() == said("INFO") == []


def test_a_dtype_that_was_not_checked_is_the_reason_in_one_line_for_all_layers(fusing, model, said):
    applied = fusing.apply_all(model)
    model.half()
    found = looked(applied, lambda: model(inputs(dtype=torch.float16)))
    assert {each.target.method for each in found} == {"forward"}
    assert all("a dtype in which the kernel was not checked" in each.why for each in found)
    (warning,) = said()
    assert warning.startswith(f"{len(found)} of {len(applied.calls())} fused targets are not in use:\n")
    assert (
        "  layers.*.norm1.forward (2 times): toy_norm: the original computed all of its 3 calls: it has a dtype"
        in warning
    )
    assert applied.check_in_use() == found
    assert len(said()) == 1


def test_a_class_that_was_patched_is_the_reason(fusing, model, said, monkeypatch):
    """Liger patches whole classes in this way, and our replacement stays in place."""
    applied = fusing.apply_all(model)
    monkeypatch.setattr(Norm, "forward", lambda self, hidden_states: hidden_states)
    looked(applied, lambda: model(inputs()))
    assert "forward is no longer the one that was replaced" in said()[0]


def test_the_reasons_are_those_of_a_few_calls(fusing, model, monkeypatch):
    """A reason takes long to find, so a step with many microbatches does not look for it in each of them."""
    applied = fusing.apply_all(model)
    model.half()
    asked = []
    original = Replacement.why_original

    def why(self, args, *others):
        asked.append(args[0])
        return original(self, args, *others)

    monkeypatch.setattr(Replacement, "why_original", why)

    def step():
        for _ in range(8):
            model(inputs(dtype=torch.float16))

    looked(applied, step)
    norms = [each for each in asked if isinstance(each, Norm)]
    assert {norms.count(each) for each in norms} == {3}


@pytest.fixture
def _as_users_call(monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")


@pytest.mark.usefixtures("_as_users_call")
def test_what_is_too_small_to_gain_is_no_fault(model, said):
    kernel = variant_of(NormKernel, gains_from=lambda self, use: 1 << 20)
    applied = manager_of(kernel).apply_all(model)
    found = looked(applied, lambda: model(inputs()))
    assert len(found) == 5
    assert all(each.too_small for each in found)
    assert said() == []
    assert said("INFO") == ["5 of 5 fused targets had no call large enough to gain"]


def test_a_site_that_is_passed_by_is_named(fusing, model, said):
    applied, norm = fusing.apply_all(model), model.norm
    model.norm = torch.nn.Identity()
    (found,) = looked(applied, lambda: model(inputs()))
    assert (found.paths, found.why) == (("norm",), "it was not called, though others were")
    assert said() == [
        f"1 of {len(applied.calls())} fused targets are not in use:\n  norm.forward: toy_norm: {found.why}"
    ]
    assert norm.__dict__["forward"]


def test_a_module_that_is_gone_is_named(fusing, model, said):
    applied = fusing.apply_all(model)
    model.norm = torch.nn.Identity()
    gc.collect()
    (found,) = looked(applied, lambda: model(inputs()))
    assert (found.paths, found.target.method) == (("norm",), "forward")
    assert "norm.forward: toy_norm: its module is gone" in said()[0]


def test_a_model_that_is_not_the_one_that_runs_is_said(fusing, model, said):
    applied, other = fusing.apply_all(model), Toy()
    looked(applied, lambda: other(inputs()))
    assert "no fused module was called: is it this model, or a copy of it, that is run?" in said()[0]


def test_a_lost_replacement_is_named_with_what_is_there(fusing, model, said):
    def liger(self, hidden_states):
        return hidden_states

    applied = fusing.apply_all(model)
    model.norm.forward = types.MethodType(liger, model.norm)
    (found,) = looked(applied, lambda: model(inputs()))
    assert found.paths == ("norm",)
    assert "its replacement was taken off, and it is " in said()[0]
    assert ".liger now: take that off; apply_all puts it back" in said()[0]
    del model.norm.forward
    assert looked(fusing.apply_all(model), lambda: model(inputs())) == QUIET


class TestUnasked:
    """The warning comes after ten calls, and nobody has to ask for it."""

    @pytest.fixture
    def fusing(self):
        return manager_of(NormKernel)

    def run(self, model, times=10, **options):
        for _ in range(times):
            model(inputs(**options))

    def test_a_cast_afterwards_is_said_in_the_tenth_call_and_once(self, fusing, model, said):
        fusing.apply_all(model)
        model.half()
        self.run(model, 9, dtype=torch.float16)
        assert said() == []
        self.run(model, 30, dtype=torch.float16)
        (warning,) = said()
        assert warning.startswith(
            "5 of 5 fused targets are not in use:\n  layers.*.norm1.forward (2 times): toy_norm: "
        )
        assert "the original computed its last 10 calls: it has a dtype in which the kernel was not checked" in warning
        assert warning.count("apply_all, called again, checks the kernels for that") == 3  # norm1, norm2, norm

    def test_what_was_said_is_not_said_again_to_who_asks(self, fusing, model, said):
        applied = fusing.apply_all(model)
        model.half()
        self.run(model, dtype=torch.float16)
        assert len(applied.check_in_use(1)) == 5
        assert len(said()) == 1

    def test_nor_is_it_said_unasked_when_somebody_has_asked(self, fusing, model, said):
        applied = fusing.apply_all(model)
        model.half()
        assert looked(applied, lambda: self.run(model, 1, dtype=torch.float16))
        self.run(model, 20, dtype=torch.float16)
        assert len(said()) == 1

    def test_calls_before_the_cast_do_not_hide_those_after_it(self, fusing, model, said):
        fusing.apply_all(model)
        self.run(model, 13)
        model.half()
        self.run(model, 9, dtype=torch.float16)
        assert said() == []
        self.run(model, 1, dtype=torch.float16)
        assert "5 of 5 fused targets are not in use" in said()[0]

    def test_calls_that_the_kernel_computes_in_between_begin_the_count_anew(self, fusing, model, said):
        fusing.apply_all(model)
        for _ in range(4):
            model.half()
            self.run(model, 9, dtype=torch.float16)
            model.float()
            self.run(model, 1)
        assert said() == []

    def test_one_layer_alone_is_said(self, fusing, model, said):
        fusing.apply_all(model)
        model.norm.register_forward_pre_hook(lambda module, args: (args[0].half(),))
        self.run(model, 12)
        (warning,) = said()
        assert warning.startswith("1 of 5 fused targets are not in use:\n  norm.forward: toy_norm: ")

    def test_a_module_that_is_passed_by_is_said_with_who_may_do_it(self, fusing, model, said):
        fusing.apply_all(model)

        def short_cut(self, x):
            return self.layers[1](self.layers[0](x))

        model.forward = types.MethodType(short_cut, model)
        self.run(model, 9)
        assert said() == []
        self.run(model, 5)
        (warning,) = said()
        assert warning.startswith("1 of 5 fused targets are not in use:\n  norm.forward: toy_norm: it was not called")
        assert "10 times; the forward of the model is " in warning
        assert ".short_cut, which may compute past it" in warning

    def test_who_reads_the_weight_computes_past_it(self, fusing, model, said):
        fusing.apply_all(model)
        forward = type(model).forward

        @functools.wraps(forward)
        def own_head(self, x):
            x = self.layers[1](self.layers[0](x))
            return x * self.norm.weight

        model.forward = types.MethodType(own_head, model)
        self.run(model)
        assert f": {__name__}.own_head computes past it" in said()[0]

    def test_what_cannot_be_judged_hinders_no_call(self, fusing, model, said, monkeypatch):
        fusing.apply_all(model)
        monkeypatch.setattr(InUse, "_refused", lambda self: 1 / 0)
        model.half()
        self.run(model, 25, dtype=torch.float16)
        assert said() == []

    def test_a_method_that_was_replaced_is_said_with_whose_it_is(self, model, said):
        manager_of(NormKernel, RotaryKernel).apply_all(model)
        model.layers[1].attention.forward = types.MethodType(lambda self, x: x, model.layers[1].attention)
        self.run(model)
        (warning,) = said()
        assert warning.startswith(
            "1 of 7 fused targets are not in use:\n  layers.1.attention.forward:apply_rotary: toy_rotary"
        )
        assert "its replacement was taken off, and it is " in warning

    def test_what_a_block_took_off_again_is_not_missed(self, model, said):
        manager = manager_of(NormKernel, RotaryKernel)
        manager.apply("toy_norm", model)
        with manager.apply("toy_rotary", model):
            self.run(model, 2)
        self.run(model)
        assert said() == []
        model.half()
        self.run(model, dtype=torch.float16)
        assert said()[0].startswith("5 of 5 fused targets are not in use:")

    def test_a_layer_that_is_left_out_is_not_said(self, fusing, model, said):
        fusing.apply_all(model)
        model.forward = lambda x: model.norm(model.layers[0](x))
        self.run(model, 30)
        assert said() == []

    def test_a_part_that_is_called_many_times_in_one_call_says_nothing_of_what_comes_after(self, fusing, said):
        class Looped(Toy):
            def forward(self, x):
                x = self.norm(x)
                for _ in range(12):
                    x = self.layers[0](x)
                return self.last(self.layers[1](x))

        model = Looped()
        model.last = Norm()
        fusing.apply_all(model)
        self.run(model, 12)
        assert said() == []

    @pytest.mark.usefixtures("_as_users_call")
    def test_ten_tokens_that_are_decoded_are_no_evidence(self, model, said):
        kernel = variant_of(NormKernel, gains_from=lambda self, use: 2 * 64 * 16)
        manager_of(kernel).apply_all(model)
        self.run(model, 30, rows=1)
        model.half()
        self.run(model, 30, rows=1, dtype=torch.float16)
        assert said() == []
        self.run(model, 10, rows=64, dtype=torch.float16)
        assert len(said()) == 1

    @pytest.mark.usefixtures("_as_users_call")
    def test_nor_if_they_are_called_in_a_way_that_was_not_tried(self, said):
        kernel = variant_of(NormKernel, gains_from=lambda self, use: 1 << 10)
        norm = Norm()
        manager_of(kernel).apply_all(norm)

        def call(rows):
            with contextlib.suppress(TypeError):
                norm(inputs(rows=rows), None)

        for _ in range(30):
            call(1)
        assert said() == []
        for _ in range(10):
            call(64)
        assert "it is called in a way that was not tried" in said()[0]

    def test_calls_outside_those_for_which_the_kernel_was_made_are_no_evidence(self, said):
        from support.losses import PlainKernel, apply, ids

        model = tiny_llama().train()
        applied = apply(PlainKernel, model)
        with torch.no_grad():
            for _ in range(30):
                model(input_ids=ids(), labels=ids())
        assert applied.calls()[0].original == 30
        assert said() == []

    def test_logits_that_are_read_in_every_step_are_said(self, said):
        from support.losses import PlainKernel, apply, ids

        model = tiny_llama().train()
        apply(PlainKernel, model)
        for _ in range(12):
            model(input_ids=ids(), labels=ids()).logits.sum().item()
        (warning,) = said()
        assert "lazy results were computed after all, for " in warning

    def test_a_loss_that_reads_them_now_and_then_is_not(self, said):
        from support.losses import PlainKernel, apply, ids

        model = tiny_llama().train()
        apply(PlainKernel, model)
        for number in range(24):
            logits = model(input_ids=ids(), labels=ids()).logits
            if number % 3 == 0:
                logits.sum().item()
        assert said() == []

    def test_each_model_has_its_warning(self, fusing, said):
        for model in (Toy(), Toy()):
            fusing.apply_all(model)
            model.half()
            self.run(model, dtype=torch.float16)
        assert len(said()) == 2

    def test_after_it_was_applied_again_it_is_judged_again(self, fusing, model, said):
        fusing.apply_all(model)
        self.run(model)
        model.half()
        fusing.apply_all(model)
        self.run(model, dtype=torch.float16)
        assert said() == []
        model.double()
        self.run(model, dtype=torch.float64)
        assert len(said()) == 1

    def test_an_undone_model_says_nothing(self, fusing, model, said):
        applied = fusing.apply_all(model)
        model.half()
        self.run(model, 5, dtype=torch.float16)
        applied.undo()
        self.run(model, 20, dtype=torch.float16)
        assert said() == []

    @pytest.mark.parametrize("backend", first_quick(["eager", "aot_eager"]))
    def test_compiled_calls_are_no_evidence(self, model, said, backend):
        torch.compiler.reset()
        manager_of(variant_of(NormKernel, function="support.kernels:quiet_norm")).apply_all(model)
        model.half()
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        for _ in range(20):
            compiled(inputs(dtype=torch.float16))
        assert said() == []


@pytest.mark.parametrize("rank", ["0", "1"])
def test_one_rank_speaks_and_all_know(fusing, model, said, monkeypatch, rank):
    monkeypatch.setenv("RANK", rank)
    applied = fusing.apply_all(model)
    model.half()
    assert looked(applied, lambda: model(inputs(dtype=torch.float16)))
    assert len(said()) == (rank == "0")


@pytest.mark.parametrize("backend", first_quick(["eager", "aot_eager"]))
def test_what_a_compiled_program_calls_is_taken_to_be_in_use(model, said, backend):
    torch.compiler.reset()
    kernels = variant_of(NormKernel, function="support.kernels:quiet_norm")
    applied = manager_of(kernels).apply_all(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert looked(applied, lambda: compiled(inputs())) == QUIET
    assert said() == []
    assert not ran
