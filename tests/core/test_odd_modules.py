"""An odd module is one line of the report, and everything else is planned."""

import re
import threading

import pytest
import torch
from support.kernels import NormKernel
from support.models import Norm, inputs
from support.thorough import covering, thorough
from torch import nn
from torch._subclasses import FakeTensorMode

from fuseplug import KernelManager

pytestmark = pytest.mark.usefixtures("checked_once")


def with_buffer(tensor):
    norm = Norm()
    norm.register_buffer("more", tensor)
    return norm


def with_attribute(value, norm=None):
    norm = norm or Norm()
    norm.__dict__["more"] = value
    return norm


def with_weight(weight):
    norm = Norm()
    norm._parameters["weight"] = weight
    return norm


def holding_itself(kind):
    held = kind()
    (held.append if kind is list else held.__setitem__)(*([held] if kind is list else ["it", held]))
    return with_attribute(held)


def diamond():
    held = [1]
    for _ in range(60):
        held = [held, held]
    return with_attribute(held)


def deep():
    held = []
    for _ in range(100_000):
        held = [held]
    return with_attribute(held)


def fake(norm):
    with FakeTensorMode():
        norm.register_buffer("more", torch.ones(3))
    return norm


def escaped():
    """A tensor that `torch.func` wrapped, and that outlives the function."""
    kept = []
    torch.func.vmap(lambda x: kept.append(x) or x)(torch.ones(16, 2))
    return kept[0]


def scripted():
    return torch.jit.script(nn.Linear(2, 2))


def raising(*args):
    raise RuntimeError("not today")


class Without(nn.Module):
    """A module whose ``__init__`` does not call that of `nn.Module`."""

    def __init__(self):
        pass


class Hostile:
    __getattribute__ = __eq__ = __hash__ = raising


class Uncopying:
    __deepcopy__ = __reduce_ex__ = raising


class Asking(Norm):
    """A norm whose forward needs an attribute that cannot be copied."""

    def __init__(self):
        super().__init__()
        self.more = Uncopying()
        self.more.scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.more.scale


class Exiting:
    def __reduce_ex__(self, protocol):
        raise SystemExit


class GetAttr(Norm):
    def __getattr__(self, name):
        return super().__getattr__(name) if name == "weight" else raising()


class GetAttribute(Norm):
    armed = False

    def __getattribute__(self, name):
        return raising() if type(self).armed else super().__getattribute__(name)


class Equal(Norm):
    __eq__ = raising


class Hash(Norm):
    __eq__ = __hash__ = raising


class Class(Norm):
    __class__ = property(raising)


class Listing(Norm):
    """A norm whose forward calls a module that is not its child."""

    def __init__(self):
        super().__init__()
        self.more = [nn.Identity()]

    def forward(self, x):
        return super().forward(self.more[0](x))


class Walks(Norm):
    modules = named_modules = children = named_children = parameters = named_parameters = raising


class Locked(Norm):
    def __init__(self):
        super().__init__()
        self.more = threading.Lock()

    def forward(self, x):
        with self.more:
            return super().forward(x)


class Meta(type):
    __hash__ = __eq__ = raising


class OfMeta(Norm, metaclass=Meta):
    pass


class Refusing(torch.Tensor):
    __torch_function__ = classmethod(raising)


def armed():
    module = GetAttribute()
    GetAttribute.armed = True
    return module


def no_module():
    linear = nn.Linear(2, 2)
    linear._modules["child"] = 3
    return linear


def no_registry():
    norm = Norm()
    norm.__dict__["_parameters"] = None
    return norm


def nested(layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)


# Each with the reason in the report; None if it is fused like any other module.
ODD = {
    "sparse buffer": (lambda: with_buffer(torch.eye(3).to_sparse()), "sparse_coo, and kernels read dense"),
    "CSR attribute": (lambda: with_attribute(torch.eye(3).to_sparse_csr()), "sparse_csr, and kernels read dense"),
    "sparse weight": (lambda: with_weight(nn.Parameter(torch.ones(16).to_sparse())), "its weight is of layout"),
    "nested buffer": (lambda: with_buffer(nested(torch.strided)), "a nested tensor"),
    "jagged buffer": (lambda: with_buffer(nested(torch.jagged)), "a nested tensor"),
    "mkldnn buffer": (lambda: with_buffer(torch.eye(3).to_mkldnn()), "_mkldnn"),
    "quantised": (
        lambda: with_buffer(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)),
        "quantised to torch.quint8",
    ),
    "torch.func attribute": (lambda: with_attribute(escaped()), "wrapped by torch.func"),
    "torch.func weight": (lambda: with_weight(escaped()), "wrapped by torch.func"),
    "fake buffer": (lambda: fake(Norm()), "while it was verified|forward cannot be run"),
    "tensor that refuses": (lambda: with_attribute(torch.ones(3).as_subclass(Refusing)), "cannot be examined"),
    "lazy linear": (lambda: nn.LazyLinear(4), "its weight is lazy.*run the model once"),
    "lazy weight": (lambda: with_weight(nn.UninitializedParameter()), "its weight is lazy"),
    "lazy buffer": (lambda: with_buffer(nn.UninitializedBuffer()), "its more is lazy"),
    "sparse in a list": (lambda: with_attribute([torch.eye(3).to_sparse()]), None),
    "list of itself": (lambda: holding_itself(list), None),
    "dict of itself": (lambda: holding_itself(dict), None),
    "many lists of one": (diamond, None),
    "deep list": (deep, None),
    "no __init__": (Without, "has no registries"),
    "child that is no module": (no_module, "its child child is int"),
    "no registry": (no_registry, "cannot be examined"),
    "__getattr__": (GetAttr, "not today"),
    "__getattribute__": (armed, "not today"),
    "__eq__": (Equal, "unhashable"),
    "__hash__": (Hash, "not today"),
    "__class__": (Class, None),
    "module that is no child": (Listing, "it calls a module that is not below it: Identity"),
    "metaclass": (OfMeta, "not today"),
    "modules()": (Walks, "not today"),
    "hostile attribute": (lambda: with_attribute(Hostile()), None),
    "uncopyable attribute": (lambda: with_attribute(Uncopying()), None),
    "uncopyable attribute that is used": (Asking, "its attribute more, a Uncopying, cannot be copied.*not today"),
    "attribute whose copy exits": (lambda: with_attribute(Exiting()), None),
    "lock that is not used": (lambda: with_attribute(threading.Lock()), None),
    "lock that is used": (Locked, "in a context whose effect is not known: self.more"),
    "TorchScript": (scripted, "TorchScript"),
}


RAISE_IN_MATCH = {"__getattr__", "__getattribute__"}
"""Modules that a kernel cannot look at. The report then has an error of the kernel, and no row for the module."""


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    GetAttribute.armed = False


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_an_odd_module_is_one_row_and_its_neighbour_is_fused(manager, name):
    manager.register(NormKernel)
    make, why = ODD[name]
    neighbour, odd = Norm(eps=1e-5), make()
    model = nn.Module()
    model._modules = {"norm": neighbour, "odd": odd}
    want, held = neighbour(inputs()), dict(vars(nn.Module)["__dict__"].__get__(odd))
    applied = manager.apply_all(model)
    rows = {entry.paths: entry for entry in applied.report.entries}
    assert rows["norm",].fused
    if name in RAISE_IN_MATCH:
        assert rows.keys() == {("norm",)}
        (reason,) = applied.report.raised.values()
        assert reason.startswith("asked about odd: ")
    else:
        assert rows.keys() == {("norm",), ("odd",)}
        assert rows["odd",].fused == (why is None), rows["odd",].why_not
        reason = rows["odd",].why_not
    if why is not None:
        assert re.search(why, reason)
    assert str(applied.report)
    assert torch.allclose(neighbour(inputs()), want)
    assert manager.applied_to(model) is not None
    applied.undo()
    now = vars(nn.Module)["__dict__"].__get__(odd)
    assert list(now) == list(held)
    assert all(now[key] is held[key] for key in held)
    assert "forward" not in vars(neighbour)


@pytest.mark.parametrize(
    "name", covering(map(pytest.param, ODD), by=lambda name: [name in RAISE_IN_MATCH, ODD[name][1] is None])
)
@pytest.mark.filterwarnings("ignore")
def test_an_odd_module_may_be_the_whole_model(manager, name):
    manager.register(NormKernel)
    make, why = ODD[name]
    report = manager.plan(make()).report
    assert [entry.fused for entry in report.entries] == ([] if name in RAISE_IN_MATCH else [why is None])
    assert len(report.raised) == (name in RAISE_IN_MATCH)


def test_what_nobody_looks_at_and_nothing_raises_has_no_row(manager):
    manager.register(NormKernel)
    linear = nn.Linear(2, 2)
    linear.register_buffer("mask", torch.eye(2).to_sparse())
    linear.more = threading.Lock()
    assert not manager.plan(linear).report.entries


def test_a_module_graph_may_have_a_cycle(manager):
    manager.register(NormKernel)
    parent = nn.Sequential(Norm(), nn.Linear(2, 2))
    parent[1].parent = parent
    assert [entry.paths for entry in manager.apply_all(parent).report.fused] == [("0",)]
    manager.undo(parent)
    assert "forward" not in vars(parent[0])


def test_modules_that_share_children_at_every_level_are_walked_once(manager):
    manager.register(NormKernel)
    module = Norm()
    for _ in range(25):  # 33 million paths
        module = nn.Sequential(module, module)
    assert len(manager.plan(module).report.fused) == 1


FREED = """
import torch
from torch import nn
from support.kernels import NormKernel
from support.models import Norm
from fuseplug import KernelManager

manager = KernelManager(find=lambda environ, registered: list(registered))
manager.register(NormKernel)
flat = torch.ones(64)
odd = Norm()
del odd._parameters["weight"]
odd.weight = flat[16:32]
odd.more = [flat[3:5]]
odd.register_buffer("last", flat[60:])
flat.untyped_storage().resize_(0)
report = manager.plan(nn.ModuleList([Norm(), odd])).report
assert report.entries[0].fused
print(len(report.entries), "rows")
"""


@thorough
def test_views_of_freed_memory_are_not_read(fresh_python, monkeypatch):
    import sys
    from pathlib import Path

    monkeypatch.setenv("PYTHONPATH", ":".join([str(Path(__file__).parents[1]), *filter(None, sys.path)]))
    done = fresh_python(FREED)
    assert (done.returncode, done.stdout) == (0, "2 rows\n"), done.stderr


def test_handles_are_kept_by_identity():
    class Alike(Norm):
        def __eq__(self, other):
            return isinstance(other, Alike)

        def __hash__(self):
            return 1

    manager = KernelManager(environ={}, find=lambda environ, registered: list(registered))
    manager.register(NormKernel)
    one, other = Alike(), Alike()
    manager.apply_all(one)
    manager.apply_all(other)
    manager.undo(one)
    assert "forward" not in vars(one)
    assert "forward" in vars(other)
    assert manager.applied_to(other) is not None
    assert len(manager.plan(nn.ModuleList([Alike(eps=1e-5), Alike()])).report.fused) == 2
