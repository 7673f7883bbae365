"""Each kind of finding: forwards that have it, and forwards that come near it and do not."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import random
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan

from fuseplug_verify.reading.findings import Reading
from fuseplug_verify.reading.reader import read

LOSSES: list[object] = []
SETTINGS = {"limit": 64, "scale": 1.0}
COUNT = 0
TABLE = torch.ones(4)
LOGGER = logging.getLogger(__name__)


class Counter:
    def __init__(self):
        self.calls = 0

    def tick(self):
        self.calls += 1

    def peek(self):
        return self.calls


class Module(nn.Module):
    """Has one of everything; what a case gives is its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(1))
        self.scale, self.limit, self.flag, self.p = 1.0, 48, False, 0.1
        self.items, self.counter, self.last = [], Counter(), None
        self.proj, self.act, self.drop = nn.Linear(4, 4), nn.GELU(), nn.Dropout(0.1)
        self.norm = nn.BatchNorm1d(4)

    def keep(self, x):
        self.last = x
        return x

    def double(self, x):
        return 2 * x

    def touched(self, x):
        x.mul_(2)
        return x

    @property
    def counted(self):
        self.counter.tick()
        return self.scale


def reading(forward) -> Reading:
    return read(forward, Module())


def helper_of_lists(values, x):
    values.append(x)


# Effects


def sets_attribute(self, x):
    self.last = x
    return x


def adds_to_attribute(self, x):
    self.scale += 1
    return x


def adds_to_buffer(self, x):
    self.seen += x.sum()
    return x


def adds_to_buffer_by_name(self, x):
    seen = self.seen
    seen += 1
    return x


def writes_into_view_of_buffer(self, x):
    self.seen.view(-1)[0] = 1.0
    return x


def writes_into_parameter(self, x):
    self.weight.data.mul_(0.9)
    return x


def writes_out(self, x):
    torch.add(x, 1, out=self.seen)
    return x


def writes_into_global_tensor(self, x):
    TABLE[0] = 3
    return x


def appends_to_global(self, x):
    LOSSES.append(x)
    return x


def sets_item_of_global(self, x):
    SETTINGS["scale"] = 2.0
    return x


def sets_global(self, x):
    global COUNT
    COUNT = 1
    return x


def deletes_attribute(self, x):
    del self.last
    return x


def calls_a_method_that_keeps(self, x):
    return self.keep(x)


def looks_at_a_property_that_counts(self, x):
    return x * self.counted


def ticks(self, x):
    self.counter.tick()
    return x


def hands_its_list_to_a_helper(self, x):
    helper_of_lists(self.items, x)
    return x


def in_a_comprehension(self, x):
    return [self.items.append(each) for each in x]


def in_a_lambda(self, x):
    return (lambda y: self.items.append(y))(x)


def in_a_function_that_is_handed_over(self, x):
    def keeps(left, right):
        self.last = left
        return left + right

    return associative_scan(keeps, x, 0)


def in_place_of_what_it_is_handed(self, x):
    def adds(left, right):
        return left.add_(right)

    return associative_scan(adds, x, 0)


def into_what_a_scan_returns(self, x):
    def adds(left, right):
        return left + right

    scanned = associative_scan(adds, self.seen, 0)
    scanned.mul_(2)
    return x * scanned


def in_a_nested_function(self, x):
    def inner(y):
        self.last = y

    inner(x)
    return x


def in_a_branch(self, x):
    try:
        y = x + 1
    except ValueError:
        self.last = x
        raise
    return y


def prints(self, x):
    print(x)
    return x


def sets_by_function(self, x):
    setattr(self, "last", x)  # noqa: B010
    return x


def registers(self, x):
    self.register_buffer("other", x)
    return x


def changes_class(self, x):
    type(self).shared = x
    return x


def counts_batches(self, x):
    return self.norm(x)


def relu_in_place_of_weight(self, x):
    return x * F.relu(self.weight, inplace=True)


def either_may_be_the_buffer(self, x):
    into = self.seen if self.flag else x.clone()
    into.add_(1)
    return x


def sets_seed(self, x):
    torch.manual_seed(0)
    return x


def advances(self, x):
    next(self.batches)
    return x


def swaps(self, x):
    self.last, y = x, 2 * x
    return y


def through_partial(self, x):
    functools.partial(helper_of_lists, self.items)(x)
    return x


def maps(self, x):
    return list(map(self.keep, [x]))


# Nothing of the kind


def computes(self, x):
    y = x * self.weight
    y += 1
    y[0] = 2
    y.mul_(2)
    y.view(-1)[1] = 3
    return y


def writes_into_argument(self, x):
    x += 1
    x[0] = 0
    x.clamp_(min=0)
    return self.touched(x)


def fills_a_list_of_its_own(self, x):
    found = []
    found.append(x)
    found += [self.double(x)]
    helper_of_lists(found, x)
    return sum(found) + {"y": x}["y"]


def fills_a_dict_of_its_own(self, x):
    more = {"x": x}
    more["y"] = x
    return more["y"]


def reads_its_list(self, x):
    return x if x in self.items else x * len(self.items) * SETTINGS.get("scale", 1.0)


def numbers_are_not_changed(self, x):
    scale = self.scale
    scale += 1
    scale *= 2
    return x * scale


def a_copy_of_weight(self, x):
    weight = self.weight * 1
    weight.mul_(2)
    weight[0] = 0
    return x * weight


def logs(self, x):
    LOGGER.warning("%s", x.shape)
    warnings.warn("again", stacklevel=2)
    return x


def sets_nonlocal_of_the_call(self, x):
    total = 0

    def inner(y):
        nonlocal total
        total = total + y

    inner(x)
    return total


def hands_over_a_function_of_its_own(self, x):
    def adds(left, right):
        both = left + right
        return both * SETTINGS["scale"]

    return associative_scan(adds, x, 0)


def decorates_a_function_of_its_own(self, x):
    @functools.cache
    def adds(left, right):
        return left + right

    return associative_scan(adds, x, 0)


def has_a_default_that_counts(self, x):
    def adds(left, right, number=COUNT):
        return left + right + number

    return associative_scan(adds, x, 0)


def calls_what_its_own_function_encloses(self, x):
    double = self.double

    def doubles(left, right):
        return double(left) + right

    return associative_scan(doubles, x, 0)


def makes_an_instance(self, x):
    counter = Counter()
    counter.tick()
    counter.calls = 3
    return x * counter.calls


def looks_at_the_counter(self, x):
    return x * self.counter.peek()


def takes_its_keywords_apart(self, x, **more):
    more.pop("y", None)
    more["z"] = 1
    return x


def relu_in_place_of_what_it_made(self, x):
    return F.relu(x + 1, inplace=True)


EFFECTS = [
    sets_attribute, adds_to_attribute, adds_to_buffer, adds_to_buffer_by_name, writes_into_view_of_buffer,
    writes_into_parameter, writes_out, writes_into_global_tensor, appends_to_global, sets_item_of_global, sets_global,
    calls_a_method_that_keeps, looks_at_a_property_that_counts, ticks, hands_its_list_to_a_helper, in_a_comprehension,
    in_a_branch, prints, sets_by_function, counts_batches, relu_in_place_of_weight, either_may_be_the_buffer, swaps,
    in_a_function_that_is_handed_over, in_place_of_what_it_is_handed, into_what_a_scan_returns,
]  # fmt: skip
NONE = [
    computes, writes_into_argument, reads_its_list, numbers_are_not_changed, a_copy_of_weight,
    logs, looks_at_the_counter, relu_in_place_of_what_it_made, hands_over_a_function_of_its_own,
]  # fmt: skip
NOT_READ = [
    deletes_attribute, in_a_lambda, in_a_nested_function, registers, sets_seed, advances, through_partial, maps,
    sets_nonlocal_of_the_call, makes_an_instance, takes_its_keywords_apart, fills_a_dict_of_its_own,
    fills_a_list_of_its_own, changes_class, decorates_a_function_of_its_own, has_a_default_that_counts,
    calls_what_its_own_function_encloses,
]  # fmt: skip
"""What is rare in forwards that are fused, whether or not it has an effect."""


def name(function) -> str:
    return function.__name__


@pytest.mark.parametrize("forward", EFFECTS, ids=name)
def test_an_effect_is_found(forward):
    found = reading(forward)
    assert len(found.side_effects) == 1, found.side_effects
    assert found.unread == []


@pytest.mark.parametrize("forward", NONE, ids=name)
def test_what_is_made_in_the_call_may_change(forward):
    found = reading(forward)
    assert found.side_effects == []
    assert found.unread == []


@pytest.mark.parametrize("forward", NOT_READ, ids=name)
def test_what_is_rare_is_not_read(forward):
    module = Module()
    module.batches = iter([1])
    assert read(forward, module).unread


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("while x.dim() > 2:\n        x = x[0]", "While"),
        ("y = yield x", "Yield"),
        ("match x.dim():\n        case 2: x = 2 * x", "Match"),
        ("async def y(): pass", "AsyncFunctionDef"),
        ("y = lambda: x", "Lambda"),
        ("y = (z := x)", "NamedExpr"),
        ("y = {1 for _ in x}", "SetComp"),
    ],
)
def test_a_kind_of_code_that_is_not_known_is_not_read(tmp_path, monkeypatch, text, kind):
    (tmp_path / f"code_{kind}.py").write_text(f"def forward(self, x):\n    {text}\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = reading(importlib.import_module(f"code_{kind}").forward)
    assert f"what is not read is {kind}" in found.unread[0]


def test_what_a_closure_holds_is_not_of_the_call():
    total = 0

    def forward(self, x):
        nonlocal total
        total = total + 1
        return x

    assert len(reading(forward).side_effects) == 1


def test_a_finding_says_what_and_where():
    (found,) = reading(calls_a_method_that_keeps).side_effects
    first = Module.keep.__code__.co_firstlineno
    assert found.text == f"self.last = x (line {first + 1} of Module.keep)"
    assert (found.file, found.inside) == (__file__, ())
    assert found.span == (first + 1, 8, first + 1, 21)


def test_a_finding_in_code_of_another_package_names_its_module(monkeypatch):
    elsewhere = types.FunctionType(Module.keep.__code__, {"__name__": "acme.offload"})
    monkeypatch.setattr(Module, "keep", elsewhere)
    (found,) = reading(calls_a_method_that_keeps).side_effects
    assert found.text.endswith(f" of acme.offload.{elsewhere.__qualname__})")


def test_a_finding_in_a_child_says_which():
    assert {found.inside for found in reading(counts_batches).side_effects} == {("norm",)}


# Contexts


def autocast_around(self, x):
    with torch.autocast("cpu", enabled=False):
        return self.proj(x)


def old_autocast(self, x):
    with torch.amp.autocast(device_type="cpu"):
        return self.proj(x)


def helper_that_gives_autocast(enabled):
    return torch.autocast("cpu") if enabled else contextlib.nullcontext()


def autocast_from_a_helper(self, x):
    with helper_that_gives_autocast(self.flag):
        return self.proj(x)


@torch.autocast("cpu")
def autocast_by_decorator(self, x):
    return x


@torch.no_grad()
def no_grad_by_decorator(self, x):
    return x


def no_grad_around(self, x):
    with torch.no_grad():
        return x


def sets_grad(self, x):
    torch.set_grad_enabled(False)
    return x


@contextlib.contextmanager
def around():
    yield 1


def other_around(self, x):
    with around():
        return x


def nothing_around(self, x):
    with contextlib.nullcontext():
        return x


@functools.wraps(autocast_by_decorator)
def calls_a_decorated_function(self, x):
    return autocast_by_decorator(self, x)


@pytest.mark.parametrize(
    "forward",
    [autocast_around, old_autocast, autocast_from_a_helper, no_grad_around, nothing_around, computes],
    ids=name,
)
def test_contexts_that_change_how_torch_computes_are_read(forward):
    found = reading(forward)
    assert (found.unread, found.side_effects) == ([], [])


@pytest.mark.parametrize(
    "forward",
    [other_around, sets_grad, autocast_by_decorator, calls_a_decorated_function, no_grad_by_decorator],
    ids=name,
)
def test_other_contexts_and_decorators_of_torch_are_not(forward):
    assert reading(forward).unread


# Random numbers


def by_child(self, x):
    return self.drop(x)


def by_function(self, x):
    return F.dropout(x, self.p, self.training)


def by_alias(self, x, drop=F.dropout):
    return drop(x)


def noise(self, x):
    return x * torch.empty_like(x).uniform_(0.9, 1.1)


def of_python(self, x):
    return x * random.random()


def no_noise(self, x):
    return x * torch.empty_like(x).fill_(1.0) + torch.zeros_like(x)


@pytest.mark.parametrize("forward", [by_child, by_function, by_alias, noise], ids=name)
def test_random_numbers_are_found(forward):
    assert reading(forward).draws


def test_random_numbers_of_python_are_not_read():
    assert "random" in reading(of_python).unread[0]


@pytest.mark.parametrize("forward", [no_noise, computes], ids=name)
def test_other_numbers_are_not_random(forward):
    assert not reading(forward).draws


# Conditions


def of_rank(self, x):
    return x if x.dim() == 4 else 2 * x


def of_length(self, x):
    if x.shape[1] > 64:
        return 2 * x
    return x


def of_a_size_of_its_own(self, x):
    n = x.size(-1)
    return x if n > self.limit else 2 * x


def of_values(self, x):
    return 2 * x if x.abs().max() > 1000 else x


def of_an_item(self, x):
    return [each for each in x if each.item() > 3]


def of_dtype(self, x):
    return x.float() if x.dtype == torch.bfloat16 else x


def of_device(self, x):
    return x if x.device.type == "cpu" else 2 * x


def of_grad(self, x):
    return x if x.requires_grad and torch.is_grad_enabled() else 2 * x


def of_autocast(self, x):
    return x.float() if torch.is_autocast_enabled("cpu") else x


def of_tracing(self, x):
    return x if torch.compiler.is_compiling() else 2 * x


def of_training(self, x):
    return x if self.training else 2 * x


def of_state(self, x):
    return x if self.flag else 2 * x


def of_a_global(self, x):
    return x if COUNT else 2 * x


def of_a_parameter(self, x):
    return x if self.weight.sum() > 3 else 2 * x


def of_presence(self, x, mask=None):
    return x if mask is None else x * mask


def of_an_option(self, x, twice=False):
    return 2 * x if twice else x


def by_or(self, x):
    return self.last or x


def through_a_helper(self, x):
    return of_rank(self, x)


@pytest.mark.parametrize(
    "forward",
    [of_rank, of_length, of_a_size_of_its_own, of_values, of_an_item, of_grad, of_a_parameter, through_a_helper],
    ids=name,
)
def test_what_only_examples_can_vary_is_a_branch(forward):
    found = reading(forward)
    assert found.branches
    assert found.unread == []


@pytest.mark.parametrize(
    "forward",
    [
        of_dtype,
        of_device,
        of_autocast,
        of_tracing,
        of_training,
        of_state,
        of_a_global,
        of_presence,
        of_an_option,
        by_or,
    ],
    ids=name,
)
def test_what_is_watched_or_tried_with_every_mix_is_none(forward):
    found = reading(forward)
    assert (found.branches, found.unread) == ([], [])


def only_raises(self, x):
    if x.shape[-1] != 4:
        raise ValueError(x.shape)
    return x


def only_asserts(self, x):
    assert x.dim() == 3, x.shape
    return x


def of_nothing_that_varies(self, x):
    for n in range(3):
        if n == 1:
            x = 2 * x
    return x


@pytest.mark.parametrize("forward", [only_raises, of_nothing_that_varies, computes], ids=name)
def test_what_only_raises_is_no_condition(forward):
    assert reading(forward).branches == []


def test_what_is_asserted_is_no_condition(tmp_path, monkeypatch):
    (tmp_path / "asserting.py").write_text("def forward(self, x):\n    assert x.dim() == 3, x.shape\n    return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import asserting

    found = reading(asserting.forward)
    assert (found.branches, found.unread) == ([], [])


@pytest.mark.parametrize(
    ("forward", "sizes"),
    [
        (of_rank, {4}), (of_length, {64}), (of_a_size_of_its_own, {48}), (of_a_global, set()), (computes, set()),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_sizes_are_what_shapes_are_compared_with(forward, sizes):
    assert reading(forward).sizes == sizes


# Clamps


def clamps(self, x):
    return x.clamp(-1e3, 1e3)


def clamps_in_place(self, x):
    return (x + 1).clamp_(max=10)


def minimum(self, x):
    return torch.minimum(x, self.weight)


def minimum_of_two(self, x):
    return torch.min(x, self.weight)


def nan_to_num(self, x):
    return torch.nan_to_num(x)


def where(self, x):
    return torch.where(x > 5, 5, x)


def by_a_mask(self, x):
    y = x.clone()
    y[x > 5] = 5
    return y


def by_a_factor(self, x):
    return x * (x < 100)


def relu6(self, x):
    return nn.ReLU6()(x)


def minimum_along(self, x):
    return x - x.min(-1).values


@pytest.mark.parametrize(
    "forward",
    [clamps, clamps_in_place, minimum, minimum_of_two, nan_to_num, where, by_a_mask, by_a_factor, relu6],
    ids=name,
)
def test_clamps_are_found(forward):
    assert reading(forward).clamps


@pytest.mark.parametrize("forward", [minimum_along, computes], ids=name)
def test_other_computation_does_not_clamp(forward):
    assert not reading(forward).clamps


def test_numbers_are_those_written_in_all_code_that_is_read():
    def forward(self, x):
        return self.double(x) * 1e-6 + (3, 4)[0] - len([7.5 for _ in x])

    assert reading(forward).numbers >= {1e-6, 2.0, 7.5}


def test_ignored_are_parameters_that_are_never_used():
    def forward(self, x, mask=None, scale=1.0, *rest, cache=None, **more):
        return x * scale

    assert reading(forward).ignored == {"mask", "rest", "cache", "more"}
