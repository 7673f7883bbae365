"""A tree is believed if it compiles to the code of the function, and findings live no longer than that code."""

from __future__ import annotations

import ast
import gc
import importlib
import linecache
import types
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fuseplug_verify import constants, names
from fuseplug_verify.reading.findings import MISSING
from fuseplug_verify.reading.lookup import attribute
from fuseplug_verify.reading.reader import read
from fuseplug_verify.reading.source import tree_of


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Imports a module with a given text, under a name that no other test has."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(text: str, name: str = f"read_{tmp_path.name}") -> types.ModuleType:
        (tmp_path / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x",
        (
            "import torch\ndef f(x, eps=1e-6, *rest, scale: float = 2.0, **more) -> None:\n    'Doc.'\n"
            "    return torch.rsqrt(x + eps)"
        ),
        "class A:\n    def f(self, x):\n        return super().f(x) * self.__private * __class__.x\nf = A.f",
        (
            "def around(y, z):\n    class A:\n        def f(self, x):\n"
            "            return [x + y for _ in z] + self.__p\n"
            "    return A.f\nf = around(1, 2)"
        ),
        "import functools\n@functools.wraps(len)\n# a comment\ndef g(x):\n    return x\nf = g",
        "f = [\n  1,\n  lambda x: x * 2][1]",
        "fs = (lambda x: x * 2,\n  lambda x: x * 3)\nf = fs[1]",
        (
            "def f(x):\n    '''Text\nat the margin'''\n    match x:\n        case 1:\n            return 2\n"
            "    with x as y, y:\n        pass\n    return f'{x!r:>4}'"
        ),
        "def f(x):\n    def g():\n        nonlocal x\n        x = 1\n    return g, (lambda: x), {a: b for a, b in x}",
        "if True:\n\tdef f(x):\n\t\treturn x.a.b(1, *x, **x)",
    ],
)  # fmt: skip
def test_a_tree_is_found_with_its_lines_and_columns(load, text):
    module = load(text)
    tree = tree_of(module.f)
    assert tree is not None
    lines = text.splitlines()
    whole = ast.get_source_segment(text, tree)
    assert whole is not None
    assert whole in text
    assert lines[tree.lineno - 1][tree.col_offset :].startswith(("def", "lambda"))


def test_of_several_lambdas_on_a_line_none_is_read(load):
    module = load("fs = (lambda x: x * 2, lambda x: x * 3)")
    assert [tree_of(f) for f in module.fs] == [None, None]


@pytest.mark.parametrize("later", ["return x * 3", "return x + 2", "return y", "return x * 2 if x else x", "pass"])
def test_a_file_that_has_changed_since_is_not_believed(load, tmp_path, later):
    module = load("def f(x):\n    return x * 2")
    (tmp_path / f"{module.__name__}.py").write_text(f"# Later.\n{later!r}\n")
    linecache.clearcache()
    assert tree_of(module.f) is None
    (tmp_path / f"{module.__name__}.py").write_text(f"def f(x):\n    {later}\n")
    linecache.clearcache()
    assert tree_of(module.f) is None
    assert len(read(module.f).unread) == 1


def test_code_without_source_is_not_read():
    exec("def f(x):\n    return x * 7919", space := {})
    assert tree_of(space["f"]) is None


def test_nothing_keeps_what_was_read():
    text = "class A(nn.Module):\n    def forward(self, x):\n        return self.helper(x) * 7907\n"
    text += "    def helper(self, x):\n        return x\n"
    linecache.cache["<kept>"] = (len(text), None, text.splitlines(keepends=True), "<kept>")
    exec(compile(text, "<kept>", "exec"), space := {"nn": nn, "__name__": "kept"})
    cls = space["A"]
    assert read(cls.forward, cls()).unread == []
    assert names(cls.forward, cls)
    gone = [weakref.ref(cls), weakref.ref(cls.forward), weakref.ref(cls.forward.__code__)]
    del cls, space
    gc.collect()
    assert [each() for each in gone] == [None] * 3


def test_reading_parses_a_file_once(load, monkeypatch):
    module = load("\n".join(f"def f{n}(x):\n    return x * {n}" for n in range(5)))
    sizes = []
    parse = ast.parse
    monkeypatch.setattr(ast, "parse", lambda text, *rest: sizes.append(len(text)) or parse(text, *rest))
    for n in range(5):
        assert tree_of(getattr(module, f"f{n}")) is not None
        assert tree_of(getattr(module, f"f{n}")) is not None
    assert len(sizes) == 1


class Owner(nn.Module):
    shared = 1

    def __init__(self):
        super().__init__()
        self.own = 2
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.ones(1))
        self.child = nn.Identity()

    @property
    def asked(self):
        raise SystemExit("this was run")

    @staticmethod
    def fixed():
        pass


class Guarded(Owner):
    def __getattr__(self, name):
        raise SystemExit("this was run")


def guarded() -> Owner:
    owner = Owner()
    owner.__class__ = Guarded
    return owner


class Hides:
    def __getattribute__(self, name):
        raise SystemExit("this was run")


class Slots:
    __slots__ = ("full",)


class TestAttribute:
    @pytest.mark.parametrize("name", ["own", "weight", "seen", "child"])
    def test_what_an_instance_has(self, name):
        owner = guarded()
        stores = [vars(owner), owner._parameters, owner._buffers, owner._modules]
        (expected,) = [store[name] for store in stores if name in store]
        assert attribute(owner, name) is expected

    def test_what_its_class_has(self):
        owner = guarded()
        assert attribute(owner, "shared") == 1
        assert attribute(owner, "asked") is vars(Owner)["asked"]
        assert attribute(owner, "fixed") is vars(Owner)["fixed"]
        assert attribute(Owner, "shared") == 1

    def test_what_is_not_there(self):
        assert attribute(guarded(), "gone") is MISSING
        assert attribute(3, "gone") is MISSING

    def test_nothing_of_the_owner_is_run(self):
        hides = Hides.__new__(Hides)
        object.__getattribute__(hides, "__dict__")["own"] = 3
        assert attribute(hides, "own") == 3
        assert attribute(hides, "gone") is MISSING

    def test_what_is_in_a_slot_is_not_looked_up(self):
        slots = Slots()
        slots.full = 3
        assert attribute(slots, "full") is vars(Slots)["full"]

    def test_a_property_comes_before_an_instance_and_an_instance_before_a_class(self):
        owner = guarded()
        vars(owner).update(asked=1, shared=2)
        assert isinstance(attribute(owner, "asked"), property)
        assert attribute(owner, "shared") == 2


def silly(x):
    return x.abs().mean(-1) ** 0.5


class Says(nn.Module):
    def forward(self, x):
        def inner(y):
            return y.clamp(0.25) * [z.sigmoid() for z in y]

        return self.helper(silly(inner(self.proj(x)))) + torch.nn.functional.silu(x)

    def helper(self, x):
        return x.tanh() * 1e-6


class TestNames:
    def test_are_numbered_by_first_mention(self):
        found = names(Says.forward, Says)
        assert list(found.values()) == list(range(len(found)))
        assert list(found)[:3] == ["helper", "silly", "proj"]
        assert {"clamp", "sigmoid", "abs", "mean", "tanh", "silu"} <= found.keys()

    def test_of_methods_are_found_only_with_the_class(self):
        assert "tanh" not in names(Says.forward)

    def test_of_what_a_decorator_wraps_are_found(self):
        assert "abs" in names(torch.no_grad()(silly))

    def test_of_functions_of_torch_are_not(self):
        def forward(self, x):
            return checkpoint(self.proj, x)

        assert set(names(forward)) == {"checkpoint", "proj"}

    def test_follow_a_forward_that_is_replaced(self, monkeypatch):
        monkeypatch.setattr(Says, "forward", lambda self, x: x.erf())
        assert set(names(Says.forward, Says)) == {"erf"}

    def test_follow_a_helper_that_is_replaced(self, monkeypatch):
        monkeypatch.setattr(Says, "helper", lambda self, x: x.erf())
        assert "erf" in names(Says.forward, Says)
        assert "tanh" not in names(Says.forward, Says)

    def test_of_what_is_no_function_are_none(self):
        assert names(len) == {}

    def test_constants_are_floating_point_numbers_in_the_same_code(self):
        assert set(constants(Says.forward, Says)) == {0.5, 0.25, 1e-6}
        assert set(constants(silly)) == {0.5}
