"""Each kind of finding: forwards that have it, and similar forwards that do not."""

from __future__ import annotations

import contextlib
import functools
import linecache
import logging
import random  # noqa: F401 - code that is read below uses it
import textwrap
import types
import warnings  # noqa: F401

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
    """Has one of everything that a case needs; the case gives the forward."""

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


def forward_of(code: str):
    """A forward with the body *code*, whose source is where the reader looks for it."""
    text = f"def forward(self, x):\n{textwrap.indent(code, '    ')}\n    return x\n"
    linecache.cache[code] = (len(text), None, text.splitlines(keepends=True), code)
    exec(compile(text, code, "exec"), globals(), space := {})
    return space["forward"]


def every(*forwards, **codes):
    """A parameter for each function in *forwards*, and for each text in *codes*."""
    params = [pytest.param(forward, id=forward.__name__) for forward in forwards]
    return [*params, *(pytest.param(forward_of(code), id=name) for name, code in codes.items())]


def helper_of_lists(values, x):
    values.append(x)


def calls_a_method_that_keeps(self, x):
    return self.keep(x)


def counts_batches(self, x):
    return self.norm(x)


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


def computes(self, x):
    y = x * self.weight
    y += 1
    y[0] = 2
    y.mul_(2)
    y.view(-1)[1] = 3
    return y


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


def takes_its_keywords_apart(self, x, **more):
    more.pop("y", None)
    more["z"] = 1
    return x


EFFECTS = every(
    calls_a_method_that_keeps,
    counts_batches,
    in_a_function_that_is_handed_over,
    in_place_of_what_it_is_handed,
    into_what_a_scan_returns,
    sets_attribute="self.last = x",
    adds_to_attribute="self.scale += 1",
    adds_to_buffer="self.seen += x.sum()",
    adds_to_buffer_by_name="seen = self.seen; seen += 1",
    writes_into_view_of_buffer="self.seen.view(-1)[0] = 1.0",
    writes_into_parameter="self.weight.data.mul_(0.9)",
    writes_out="torch.add(x, 1, out=self.seen)",
    writes_into_global_tensor="TABLE[0] = 3",
    appends_to_global="LOSSES.append(x)",
    sets_item_of_global="SETTINGS['scale'] = 2.0",
    sets_global="global COUNT; COUNT = 1",
    looks_at_a_property_that_counts="x = x * self.counted",
    ticks="self.counter.tick()",
    hands_its_list_to_a_helper="helper_of_lists(self.items, x)",
    in_a_comprehension="return [self.items.append(each) for each in x]",
    in_a_branch="try: y = x + 1\nexcept ValueError:\n    self.last = x\n    raise\nreturn y",
    prints="print(x)",
    sets_by_function="setattr(self, 'last', x)",
    relu_in_place_of_weight="x = x * F.relu(self.weight, inplace=True)",
    either_may_be_the_buffer="into = self.seen if self.flag else x.clone(); into.add_(1)",
    swaps="self.last, x = x, 2 * x",
)
NONE = every(
    computes,
    hands_over_a_function_of_its_own,
    writes_into_argument="x += 1; x[0] = 0; x.clamp_(min=0); return self.touched(x)",
    reads_its_list="return x if x in self.items else x * len(self.items) * SETTINGS.get('scale', 1.0)",
    numbers_are_not_changed="scale = self.scale; scale += 1; scale *= 2; x = x * scale",
    a_copy_of_weight="weight = self.weight * 1; weight.mul_(2); weight[0] = 0; x = x * weight",
    logs="LOGGER.warning('%s', x.shape); warnings.warn('again', stacklevel=2)",
    looks_at_the_counter="x = x * self.counter.peek()",
    relu_in_place_of_what_it_made="x = F.relu(x + 1, inplace=True)",
)
NOT_READ = every(
    decorates_a_function_of_its_own,
    has_a_default_that_counts,
    calls_what_its_own_function_encloses,
    takes_its_keywords_apart,
    deletes_attribute="del self.last",
    in_a_lambda="(lambda y: self.items.append(y))(x)",
    in_a_nested_function="def inner(y): self.last = y\ninner(x)",
    registers="self.register_buffer('other', x)",
    sets_seed="torch.manual_seed(0)",
    advances="next(self.batches)",
    through_partial="functools.partial(helper_of_lists, self.items)(x)",
    maps="list(map(self.keep, [x]))",
    sets_nonlocal_of_the_call="total = 0\ndef inner(y):\n    nonlocal total\n    total = y\ninner(x)",
    makes_an_instance="counter = Counter(); counter.tick(); counter.calls = 3; x = x * counter.calls",
    fills_a_dict_of_its_own="more = {'x': x}; more['y'] = x; x = more['y']",
    fills_a_list_of_its_own="found = []; found.append(x); found += [self.double(x)]; helper_of_lists(found, x)",
    changes_class="type(self).shared = x",
    loops="while x.dim() > 2:\n    x = x[0]",
    yields="y = yield x",
    matches="match x.dim():\n    case 2: x = 2 * x",
    defines_a_coroutine="async def y(): pass",
    makes_a_lambda="y = lambda: x",
    names_in_an_expression="y = (z := x)",
    makes_a_set="y = {1 for _ in x}",
)
"""Code that is rare in forwards that are fused, whether or not it has an effect."""


@pytest.mark.parametrize("forward", EFFECTS)
def test_an_effect_is_found(forward):
    found = reading(forward)
    assert len(found.side_effects) == 1, found.side_effects
    assert found.unread == []


@pytest.mark.parametrize("forward", NONE)
def test_what_is_made_in_the_call_may_change(forward):
    found = reading(forward)
    assert found.side_effects == []
    assert found.unread == []


@pytest.mark.parametrize("forward", NOT_READ)
def test_what_is_rare_is_not_read(forward):
    module = Module()
    module.batches = iter([1])
    assert read(forward, module).unread


def test_a_kind_of_code_that_is_not_known_is_named():
    assert "the reader does not know While" in reading(forward_of("while x.dim() > 2:\n    x = x[0]")).unread[0]


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


def helper_that_gives_autocast(enabled):
    return torch.autocast("cpu") if enabled else contextlib.nullcontext()


@torch.autocast("cpu")
def autocast_by_decorator(self, x):
    return x


@torch.no_grad()
def no_grad_by_decorator(self, x):
    return x


@contextlib.contextmanager
def around():
    yield 1


@functools.wraps(autocast_by_decorator)
def calls_a_decorated_function(self, x):
    return autocast_by_decorator(self, x)


CONTEXTS = every(
    computes,
    autocast_around="with torch.autocast('cpu', enabled=False): return self.proj(x)",
    old_autocast="with torch.amp.autocast(device_type='cpu'): return self.proj(x)",
    autocast_from_a_helper="with helper_that_gives_autocast(self.flag): return self.proj(x)",
    no_grad_around="with torch.no_grad(): return x",
    nothing_around="with contextlib.nullcontext(): return x",
)


@pytest.mark.parametrize("forward", CONTEXTS)
def test_contexts_that_change_how_torch_computes_are_read(forward):
    found = reading(forward)
    assert (found.unread, found.side_effects) == ([], [])


OTHER_CONTEXTS = every(
    autocast_by_decorator,
    calls_a_decorated_function,
    no_grad_by_decorator,
    other_around="with around(): return x",
    sets_grad="torch.set_grad_enabled(False)",
)


@pytest.mark.parametrize("forward", OTHER_CONTEXTS)
def test_other_contexts_and_decorators_of_torch_are_not(forward):
    assert reading(forward).unread


# Random numbers


def by_alias(self, x, drop=F.dropout):
    return drop(x)


@pytest.mark.parametrize(
    "forward",
    every(
        by_alias,
        by_child="return self.drop(x)",
        by_function="return F.dropout(x, self.p, self.training)",
        noise="return x * torch.empty_like(x).uniform_(0.9, 1.1)",
    ),
)
def test_random_numbers_are_found(forward):
    assert reading(forward).draws


def test_random_numbers_of_python_are_not_read():
    assert "random" in reading(forward_of("return x * random.random()")).unread[0]


@pytest.mark.parametrize(
    "forward", every(computes, no_noise="return x * torch.empty_like(x).fill_(1.0) + torch.zeros_like(x)")
)
def test_other_numbers_are_not_random(forward):
    assert not reading(forward).draws


# Conditions


def of_rank(self, x):
    return x if x.dim() == 4 else 2 * x


def of_presence(self, x, mask=None):
    return x if mask is None else x * mask


def of_an_option(self, x, twice=False):
    return 2 * x if twice else x


OF_LENGTH = "return 2 * x if x.shape[1] > 64 else x"
OF_A_SIZE_OF_ITS_OWN = "n = x.size(-1); return x if n > self.limit else 2 * x"
OF_A_GLOBAL = "return x if COUNT else 2 * x"
BRANCHES = every(
    of_rank,
    of_length=OF_LENGTH,
    of_a_size_of_its_own=OF_A_SIZE_OF_ITS_OWN,
    of_values="return 2 * x if x.abs().max() > 1000 else x",
    of_an_item="return [each for each in x if each.item() > 3]",
    of_grad="return x if x.requires_grad and torch.is_grad_enabled() else 2 * x",
    of_a_parameter="return x if self.weight.sum() > 3 else 2 * x",
    through_a_helper="return of_rank(self, x)",
)
WATCHED = every(
    of_presence,
    of_an_option,
    of_dtype="return x.float() if x.dtype == torch.bfloat16 else x",
    of_device="return x if x.device.type == 'cpu' else 2 * x",
    of_autocast="return x.float() if torch.is_autocast_enabled('cpu') else x",
    of_tracing="return x if torch.compiler.is_compiling() else 2 * x",
    of_training="return x if self.training else 2 * x",
    of_state="return x if self.flag else 2 * x",
    of_a_global=OF_A_GLOBAL,
    by_or="return self.last or x",
    what_is_asserted="assert x.dim() == 3, x.shape",
)


@pytest.mark.parametrize("forward", BRANCHES)
def test_what_only_examples_can_vary_is_a_branch(forward):
    found = reading(forward)
    assert found.branches
    assert found.unread == []


@pytest.mark.parametrize("forward", WATCHED)
def test_what_is_watched_or_tried_with_every_mix_is_none(forward):
    found = reading(forward)
    assert (found.branches, found.unread) == ([], [])


@pytest.mark.parametrize(
    "forward",
    every(
        computes,
        only_raises="if x.shape[-1] != 4: raise ValueError(x.shape)",
        of_nothing_that_varies="for n in range(3):\n    if n == 1: x = 2 * x",
    ),
)
def test_what_only_raises_is_no_condition(forward):
    assert reading(forward).branches == []


@pytest.mark.parametrize(
    ("code", "sizes"),
    [
        ("return of_rank(self, x)", {4}),
        (OF_LENGTH, {64}),
        (OF_A_SIZE_OF_ITS_OWN, {48}),
        (OF_A_GLOBAL, set()),
        ("return x[: self.limit]", {48}),
    ],
)
def test_sizes_are_what_shapes_are_compared_with(code, sizes):
    assert reading(forward_of(code)).sizes == sizes


CLAMPS = every(
    clamps="return x.clamp(-1e3, 1e3)",
    clamps_in_place="return (x + 1).clamp_(max=10)",
    minimum="return torch.minimum(x, self.weight)",
    minimum_of_two="return torch.min(x, self.weight)",
    nan_to_num="return torch.nan_to_num(x)",
    where="return torch.where(x > 5, 5, x)",
    by_a_mask="y = x.clone(); y[x > 5] = 5; return y",
    by_a_factor="return x * (x < 100)",
    relu6="return nn.ReLU6()(x)",
)


@pytest.mark.parametrize("forward", CLAMPS)
def test_clamps_are_found(forward):
    assert reading(forward).clamps


@pytest.mark.parametrize("forward", every(computes, minimum_along="return x - x.min(-1).values"))
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
