"""Planning runs copies, so forwards and kernels change nothing of the model or of another thread."""

import collections
import copy
import functools
import random
import types

import numpy
import pytest
import torch
from support.kernels import NormKernel, variant_of
from support.models import Norm
from torch import nn


class Noting(Norm):
    """A norm that counts its calls in the object that it holds."""

    def __init__(self, held, note):
        super().__init__()
        self.held, self.note = held, note

    def forward(self, hidden_states):
        self.note(self.held)
        return super().forward(hidden_states)


class Plain:
    def __init__(self):
        self.calls = 0
        self.inner = types.SimpleNamespace(calls=[0])


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class MyList(list):
    pass


def add_one(held):
    held.calls += 1


def generator_state(generator):
    return generator.get_state().tolist()


HELD = {
    "list": (list, lambda held: held.append(1), list),
    "list of a list": (lambda: [[0]], lambda held: held[0].append(1), copy.deepcopy),
    "subclass of list": (MyList, lambda held: held.append(1), list),
    "dict": (dict, lambda held: held.update({len(held): 1}), dict),
    "Counter": (collections.Counter, lambda held: held.update("a"), dict),
    "OrderedDict": (collections.OrderedDict, lambda held: held.update({len(held): 1}), dict),
    "defaultdict": (lambda: collections.defaultdict(list), lambda held: held["a"].append(1), copy.deepcopy),
    "deque": (collections.deque, lambda held: held.append(1), list),
    "set": (set, lambda held: held.add(len(held)), set),
    "partial": (lambda: functools.partial(list.append, []), lambda held: held(1), lambda held: list(held.args[0])),
    "bound append": (lambda: [].append, lambda held: held(1), lambda held: list(held.__self__)),
    "generator": (torch.Generator, lambda held: torch.rand(1, generator=held), generator_state),
    "Random": (lambda: random.Random(1), lambda held: held.random(), lambda held: held.getstate()),
    "numpy array": (lambda: numpy.zeros(2), lambda held: held.__iadd__(1), lambda held: held.tolist()),
    "tensor in a dict": (lambda: {"t": torch.zeros(2)}, lambda held: held["t"].add_(1), lambda h: h["t"].tolist()),
    "object": (Plain, add_one, lambda held: held.calls),
    "object in an object": (Plain, lambda held: held.inner.calls.append(1), lambda held: list(held.inner.calls)),
    "slots": (Slotted, add_one, lambda held: held.calls),
    "mapping proxy": (
        lambda: types.MappingProxyType({"a": []}),
        lambda held: held["a"].append(1),
        lambda held: list(held["a"]),
    ),
    "method of an object": (lambda: Plain().inner.calls.append, lambda held: held(1), lambda h: list(h.__self__)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_forward_writes_into_is_a_copy(manager, name):
    manager.register(NormKernel)
    make, note, value = HELD[name]
    held = make()
    before, identity = value(held), id(held)
    module = Noting(held, note)
    report = manager.plan(module).report
    assert value(held) == before
    assert id(module.held) == identity
    assert not any("cannot be run" in entry.why_not for entry in report.entries), report.entries[0].why_not


def test_a_forward_that_writes_through_an_object_which_holds_the_module_writes_to_the_twin(manager):
    class Owned(Norm):
        def forward(self, hidden_states):
            self.owner.module.calls += 1
            return super().forward(hidden_states)

    manager.register(NormKernel)
    module = Owned()
    module.calls, module.owner = 0, types.SimpleNamespace(module=module)
    manager.plan(module)
    assert module.calls == 0


def test_a_kernel_that_writes_into_an_attribute_is_found_out_and_what_it_wrote_is_taken_back(manager):
    seen = []

    def writing(self, site):
        seen.append(list(site.module.sizes))
        site.module.sizes.append(1)
        return NormKernel.match(self, site)

    manager.register(variant_of(NormKernel, "writing", match=writing))
    manager.register(NormKernel)
    module = Norm()
    module.sizes = [3]
    (entry,) = manager.plan(module).report.entries
    assert entry.kernel_id == "toy_norm"
    assert "it changed the module" in dict(entry.rejections)["writing"].reason
    assert module.sizes == [3]
    assert all(sizes == [3] for sizes in seen)


def test_stand_ins_share_no_object_with_the_model(manager):
    shown = []
    manager.register(variant_of(NormKernel, match=lambda self, site: shown.append(site.module)))
    module = Norm()
    module.config = Plain()
    manager.plan(module)
    assert shown[0].config is not module.config
    assert shown[0].config.inner.calls == [0]


def test_children_of_examples_are_copied(manager):
    child = nn.Linear(16, 16)
    child.calls = collections.Counter()

    class Calling(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            self.inner.calls["forward"] += 1
            return self.inner(x)

    from fuseplug_verify import Example, Subject

    subject = Subject(Calling.forward, Calling())
    subject.run(Calling.forward, Example([torch.ones(2, 16)], children={"inner": child}))
    assert not child.calls


def test_planning_what_draws_nothing_leaves_the_generators_to_others():
    """A `Subject` is told whether its forward may draw. If not, `run` leaves the process's generators alone."""
    from fuseplug_verify import Example, Subject

    def drawing(module, x):
        torch.rand(3)  # stands for a draw of another thread
        return x * 1

    state = torch.get_rng_state()
    Subject(drawing, nn.Identity(), draws=True).run(drawing, Example([torch.ones(2)]))
    assert torch.equal(torch.get_rng_state(), state)
    Subject(drawing, nn.Identity(), draws=False).run(drawing, Example([torch.ones(2)]))
    assert not torch.equal(torch.get_rng_state(), state)
