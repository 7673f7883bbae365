"""Wrappers that others put around a module's forward, before or after us, for parallelism, mixed precision or hooks."""

import copy
import functools
import types

import pytest
import torch
from support.kernels import ran
from support.models import Norm, Toy, inputs, replicated
from support.states import differing, state_of
from support.thorough import first_quick
from torch import nn

from fuseplug import UndoError

pytestmark = pytest.mark.usefixtures("checked_once")


def closure(module):
    original = module.forward

    def tp_forward(*args, **kwargs):
        return original(*args, **kwargs) + len(module.__dict__.get("nothing", ()))

    module.forward = tp_forward


def wraps(module):
    original = module.forward

    @functools.wraps(original)
    def wrapped(*args, **kwargs):
        return original(*args, **kwargs)

    module.forward = wrapped


def bound(module):
    original = module.forward

    def forward(self, *args, **kwargs):
        return original(*args, **kwargs)

    module.forward = types.MethodType(forward, module)


def partial(module):
    module.forward = functools.partial(lambda original, x: original(x), module.forward)


def partial_keyword(module):
    module.forward = functools.partial(lambda x, original: original(x), original=module.forward)


def partial_itself(module):
    module.forward = functools.partial(module.forward)


def remembered(module):
    module._original_forward = module.forward

    def forward(self, x):
        return self._original_forward(x)

    module.forward = types.MethodType(forward, module)


class Implementation:
    """Keeps a module's own forward, as transformers' expert parallelism keeps that of the experts."""

    def __init__(self, module):
        self.experts_forward = module.forward

    def __call__(self, x):
        return self.experts_forward(x)

    def run(self, x):
        return self(x)


def an_object(module):
    implementation = Implementation(module)

    def ep_forward(x):
        return implementation(x)

    module.forward = ep_forward


def method_of_an_object(module):
    module.forward = Implementation(module).run


def compiled(module):
    module.forward = torch.compile(module.forward, backend="eager", dynamic=False)


def autocast(module):
    module.forward = torch.autocast("cpu", enabled=False)(module.forward)


def hooked(module):
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(module, hooks.ModelHook())


def three(module):
    closure(module)
    partial(module)
    wraps(module)


def hook_between(module):
    closure(module)
    hooked(module)
    bound(module)


WRAPPERS = [
    closure,
    wraps,
    bound,
    partial,
    partial_keyword,
    partial_itself,
    remembered,
    an_object,
    method_of_an_object,
    compiled,
    autocast,
    hooked,
    three,
    hook_between,
]
wrapped_in = pytest.mark.parametrize("wrap", WRAPPERS, ids=[each.__name__ for each in WRAPPERS])


def holds(value, seen=None):
    """Every function and method that *value* consists of, in order. An undo must restore them all."""
    seen = [] if seen is None else seen
    if isinstance(value, nn.Module) or any(_one(value, each) for each in seen):
        return seen
    seen.append(value)
    inner = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    inner += [value.func, *value.args, *value.keywords.values()] if isinstance(value, functools.partial) else []
    inner += [*(getattr(value, "__defaults__", None) or ()), *(getattr(value, "__kwdefaults__", None) or {}).values()]
    inner += [getattr(value, name) for name in ("__wrapped__", "__self__", "__func__") if hasattr(value, name)]
    inner += vars(value).values() if isinstance(value, Implementation) else []
    for each in inner:
        if callable(each):
            holds(each, seen)
    return seen


def _one(value, other):
    return value is other or (isinstance(value, types.MethodType) and value == other)


def same(before, after):
    return len(before) == len(after) and all(map(_one, before, after))


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def norms_run(model):
    ran.clear()
    found = model(inputs())
    return found, ran["norm"]


@wrapped_in
def test_wrapped_afterwards_it_is_in_place_and_taken_out_from_under_the_wrapper(fusing, model, wrap):
    want, part = model(inputs()), model.norm
    plain = copy.deepcopy(part)
    wrap(plain)
    applied = fusing.apply_all(model)
    wrap(part)
    wrapper = part.forward
    assert (applied.lost, fusing.applied_to(model).lost) == ([], [])
    assert fusing.apply_all(model).lost == []
    assert norms_run(model)[1] == 5
    applied.undo()
    assert part.forward is wrapper or part.forward == wrapper
    assert fusing.applied_to(model) is None
    found, count = norms_run(model)
    assert torch.equal(found, want)
    assert count == 0
    # Nothing of the replacement is left, not even where the wrapper only remembers the function that it wraps.
    kinds = [getattr(each, "__qualname__", type(each).__name__) for each in holds(part.forward)]
    assert kinds == [getattr(each, "__qualname__", type(each).__name__) for each in holds(plain.forward)]
    assert not [each for each in holds(part.forward) if "_marks" in getattr(each, "__globals__", {})]
    assert vars(part).keys() == vars(plain).keys()


@wrapped_in
def test_wrapped_before_it_goes_underneath_and_away_again_exactly(fusing, model, wrap):
    want = model(inputs())
    wrap(model.norm)
    before, inside = state_of(model), holds(model.norm.forward)
    applied = fusing.apply_all(model)
    assert len(applied.report.fused) == 7
    found, count = norms_run(model)
    torch.testing.assert_close(found, want)
    assert count == 5
    assert (applied.lost, fusing.applied_to(model).lost) == ([], [])
    applied.undo()
    assert not differing(before, state_of(model))
    assert same(inside, holds(model.norm.forward))
    assert torch.equal(norms_run(model)[0], want)


@pytest.mark.parametrize("wrap", first_quick(WRAPPERS, 4), ids=[each.__name__ for each in WRAPPERS])
def test_taken_off_and_put_on_again_under_the_same_wrapper(fusing, model, wrap):
    fusing.apply_all(model)
    wrap(model.norm)
    for _ in range(2):
        fusing.undo(model)
        assert norms_run(model)[1] == 0
        assert fusing.apply_all(model).lost == []
        assert norms_run(model)[1] == 5


@pytest.mark.parametrize("wrap", first_quick(WRAPPERS, 4), ids=[each.__name__ for each in WRAPPERS])
def test_a_copy_is_undone_without_the_original(fusing, model, wrap):
    applied = fusing.apply_all(model)
    wrap(model.norm)
    duplicate = copy.deepcopy(model)
    fusing.undo(duplicate)
    assert applied.lost == []
    assert norms_run(model)[1] == 5
    other = copy.deepcopy(model)
    applied.undo()
    assert norms_run(model)[1] == 0
    assert norms_run(other)[1] >= 4


def test_functions_inside_a_wrapped_method_are_found_too(fusing, model):
    want, attention = model(inputs()), model.layers[0].attention
    closure(attention)
    inside = holds(attention.forward)
    applied = fusing.apply_all(model)
    closure(attention)
    ran.clear()
    torch.testing.assert_close(model(inputs()), want)
    assert ran["rotary"] == 2
    assert applied.lost == []
    applied.undo()
    assert torch.equal(model(inputs()), want)
    assert all(each in holds(attention.forward) for each in inside)


def test_calls_that_overlap_are_undone_one_by_one_under_a_wrapper(fusing, model):
    attention = model.layers[0].attention
    with fusing.apply("toy_norm", model):
        closure(model.norm)
        with fusing.apply("toy_rotary", model) as inner:
            closure(attention)
            assert inner.lost == []
        assert norms_run(model)[1] == 5
        assert ran["rotary"] == 0
    assert norms_run(model)[1] == 0


# --- wrappers that hold no method of this module


def plain_function(module):
    """Wrap like accelerate's mixed precision: the wrapper holds a function, and copies of the model share it."""
    function = module.forward.__func__

    def forward(*args, **kwargs):
        return function(*args, **kwargs)

    module.forward = types.MethodType(forward, module)


def test_a_wrapper_that_holds_the_plain_function_is_seen_and_refused_for_all_its_copies(fusing, model):
    applied = fusing.apply_all(model)
    plain_function(model.norm)
    duplicate = copy.deepcopy(model)
    assert applied.lost == []
    assert norms_run(duplicate)[1] == 5
    with pytest.raises(UndoError, match=r"norm\.forward is now .*plain_function") as caught:
        applied.undo()
    assert len(caught.value.left) == 1
    assert norms_run(duplicate)[1] == 5
    assert norms_run(model)[1] == 1


def test_a_copy_under_a_wrapper_that_holds_the_plain_function_is_not_undone_silently(fusing, model):
    fusing.apply_all(model)
    plain_function(model.norm)
    duplicate = copy.deepcopy(model)
    for _ in range(2):
        with pytest.raises(UndoError, match=r": norm\.forward is now .*plain_function") as caught:
            fusing.undo(duplicate)
        assert len(caught.value.left) == 1
        assert norms_run(duplicate)[1] == 1
    duplicate.norm.__dict__.pop("forward")
    fusing.undo(duplicate)
    assert fusing.applied_to(duplicate) is None


def test_under_a_wrapper_that_holds_the_plain_function_nothing_is_put(fusing, model):
    plain_function(model.norm)
    before, inside = state_of(model), holds(model.norm.forward)
    report = fusing.apply_all(model).report
    assert len(report.fused) == 6
    (entry,) = [entry for entry in report.entries if "norm" in entry.paths]
    assert entry.rejections[0][1].kind == "foreign"
    fusing.undo(model)
    assert not differing(before, state_of(model))
    assert same(inside, holds(model.norm.forward))


def test_a_wrapper_of_another_module_is_foreign(fusing, model):
    model.norm.forward = functools.partial(model.layers[0].norm1.forward)
    assert len(fusing.apply_all(model).report.fused) == 6
    assert "forward" in vars(model.layers[0].norm1)
    assert fusing.apply_all(model).lost == []


def in_a_default(module):
    def forward(x, _original=module.forward):
        return _original(x)

    module.forward = forward


def test_what_is_in_a_default_is_not_looked_for(fusing, model):
    in_a_default(model.layers[0].norm1)
    applied = fusing.apply_all(model)
    (entry,) = [entry for entry in applied.report.left_alone if not entry.covered_by]
    assert (entry.paths, entry.rejections[0][1].kind) == (("layers.0.norm1",), "foreign")
    in_a_default(model.norm)
    assert [patch.path for patch in applied.lost] == ["norm"]
    with pytest.raises(UndoError, match=r"norm\.forward is now .*in_a_default"):
        applied.undo()


def test_a_class_patched_afterwards_is_called_though_ours_is_in_place(fusing, model, monkeypatch):
    applied = fusing.apply_all(model)
    monkeypatch.setattr(Norm, "forward", lambda self, hidden_states: hidden_states * 0)
    assert applied.lost == []
    found, count = norms_run(model)
    assert not found.any()
    assert count == 0
    applied.undo()
    assert not model(inputs()).any()


# --- modules that say they are equal


class EqualNorm(Norm):
    def __eq__(self, other):
        return type(other) is type(self)

    def __hash__(self):
        return 0


def test_modules_that_are_equal_are_each_fused(fusing):
    from fuseplug.patching import put_on, take_off

    class Odd(EqualNorm):
        __eq__, __hash__ = nn.Module.__eq__, nn.Module.__hash__

    modules = [Odd(), Odd()]
    patches = [patch for module in modules for patch in fusing.plan(module).patches]
    Odd.__eq__, Odd.__hash__ = EqualNorm.__eq__, EqualNorm.__hash__
    assert modules[0] == modules[1]
    changes = put_on(patches)
    assert all("forward" in vars(module) for module in modules)
    take_off(changes)
    assert not any("forward" in vars(module) for module in modules)


# --- nn.DataParallel


def test_a_replica_runs_its_own_parameters(fusing):
    plain, model = Toy().eval(), Toy().eval()
    want = replicated(plain, 2)(inputs())
    before = state_of(model)
    applied = fusing.apply_all(model)
    replica = replicated(model, 2)
    found, count = norms_run(replica)
    torch.testing.assert_close(found, want)
    assert count == 5
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.ndim == 1)
    applied.undo()
    assert not differing(before, state_of(model))
