"""Tests of `rebind` that need no torch: plain classes, so that they run on every supported Python."""

import dis
import functools
import gc
import importlib.util
import inspect
import os
import pickle
import subprocess
import sys
import threading
import traceback
import types
import weakref
from pathlib import Path

import pytest

from fuseplug_verify import called_functions, rebind, rebound
from fuseplug_verify.rebind import RebindError, calls, space_of

TOY = '''
def turn(x):
    return x + 1


def scale(x):
    return x * 10


class Layer:
    def forward(self, x, factor=1, *, shift: int = 0) -> int:
        """What forward does."""
        return turn(x) * factor + shift

    def both(self, x):
        return scale(turn(x))

    def by_lambda(self, x):
        return (lambda y: turn(y))(x)

    def by_function(self, x):
        def inner(y):
            def innermost():
                return turn(y)

            return innermost()

        return inner(x) + turn(x)

    def by_list(self, xs):
        return [turn(x) for x in xs]

    def by_generator(self, xs):
        return sum(turn(x) for x in xs)

    def by_class(self, x):
        class Local:
            turned = turn(x)

        return Local.turned

    def later(self, x):
        return lambda: turn(x)

    def steps(self, xs):
        for x in xs:
            yield turn(x)

    def as_attribute_too(self, x):
        return turn(x) + self.turn

    def as_method_too(self, x):
        return turn(x) + self.turn(x)

    def as_attribute_only(self, x):
        return self.turn(x)

    def as_attribute_elsewhere(self, x):
        return turn(x) + (lambda: self.turn(x))()

    def as_import_too(self, x):
        import turn as module

        return turn(x), module

    def writing(self, x):
        global turn
        turn = turn

    def writing_inside(self, x):
        def inner():
            global turn
            turn = None

        return turn(x), inner

    def deleting(self, x):
        global turn
        turn(x)
        del turn

    def as_local(self, turn):
        return turn(self)

    def as_text(self, x):
        return "turn"

    def undefined(self, x):
        return nowhere(x) + len(x)
'''


def minus(x):
    return x - 1


def square(x):
    return x * x


def passing(method):
    @functools.wraps(method)
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


def adding(amount):
    def decorator(method):
        @functools.wraps(method)
        def wrapper(*args, **kwargs):
            return method(*args, **kwargs) + amount

        return wrapper

    return decorator


def bare(method):
    def wrapper(*args, **kwargs):
        return method(*args, **kwargs)

    return wrapper


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A new Python module for every test, with its source where tracebacks look for it."""
    path = tmp_path / "rebind_toy.py"
    path.write_text(TOY)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    return module


def patch(instance, method, **replacements):
    function = rebound(getattr(type(instance), method), replacements)
    instance.__dict__[method] = types.MethodType(function, instance)


def aliases(module):
    return [name for name in vars(module) if name.startswith("_fuseplug")]


class TestCallsAndLookup:
    @pytest.mark.parametrize(
        ("method", "expected"),
        [
            ("forward", True),
            ("by_lambda", True),
            ("by_function", True),
            ("by_list", True),
            ("by_class", True),
            ("as_attribute_too", True),
            ("as_attribute_only", False),
            ("as_local", False),
            ("as_text", False),
        ],
    )
    def test_only_what_is_looked_up_as_a_global_counts(self, toy, method, expected):
        assert calls(getattr(toy.Layer, method), "turn") is expected

    def test_the_name_must_be_the_whole_name(self, toy):
        assert not calls(toy.Layer.forward, "tur")

    def test_decorators_are_seen_through(self, toy):
        assert calls(adding(5)(bare(passing(toy.Layer.forward))), "turn")

    def test_wrapped_alone_says_nothing_about_what_is_called(self, toy):
        def stranger(self, x):
            return x

        stranger.__wrapped__ = toy.Layer.forward
        assert not calls(stranger, "turn")

    def test_bound_methods_are_seen_through(self, toy):
        assert calls(toy.Layer().forward, "turn")
        assert space_of(toy.Layer().forward, "turn") is vars(toy)

    @pytest.mark.parametrize("method", [len, str.join, functools.partial(minus), int, object()])
    def test_what_is_no_python_function_calls_nothing_visible(self, method):
        assert not calls(method, "turn")

    @pytest.mark.parametrize("name", ["nowhere", "len"])
    def test_what_the_module_does_not_have(self, toy, name):
        with pytest.raises(RebindError, match=rf"'{name}' in .*undefined: rebind_toy has no global of that name\. "):
            space_of(toy.Layer.undefined, name)

    def test_what_has_no_code(self):
        with pytest.raises(RebindError, match="not looked up as a global"):
            space_of(functools.partial(minus), "turn")


class TestCalledFunctions:
    def test_those_that_are_looked_up_as_globals_by_name(self, toy):
        assert called_functions(toy.Layer.both) == {"scale": toy.scale, "turn": toy.turn}

    def test_decorators_and_nested_functions_are_seen_through(self, toy):
        assert called_functions(adding(5)(bare(toy.Layer.by_function)))["turn"] is toy.turn

    def test_an_attribute_of_that_name_is_no_global(self, toy):
        assert "turn" not in called_functions(toy.Layer.as_attribute_only)

    def test_classes_and_whatever_else_is_called_count_if_they_are_wanted(self, toy):
        toy.scale = functools.partial(toy.turn)
        assert called_functions(toy.Layer.both) == {"turn": toy.turn}
        assert called_functions(toy.Layer.both, lambda value: value is toy.scale) == {"scale": toy.scale}

    def test_what_a_name_means_is_what_it_means_now(self, toy):
        assert called_functions(toy.Layer.forward)["turn"] is toy.turn
        toy.turn = toy.scale
        assert called_functions(toy.Layer.forward)["turn"] is toy.scale

    def test_what_is_no_function_calls_nothing_that_is_seen(self):
        assert called_functions(len) == {}


class TestReplacing:
    def test_one_instance_only(self, toy):
        one, other = toy.Layer(), toy.Layer()
        patch(one, "forward", turn=minus)
        assert one.forward(5) == 4
        assert other.forward(5) == 6
        assert toy.Layer.forward(one, 5) == 6
        assert toy.turn(5) == 6

    def test_undo_is_exact(self, toy):
        layer = toy.Layer()
        before = dict(vars(toy)), dict(vars(layer)), toy.Layer.forward.__code__
        patch(layer, "forward", turn=minus)
        assert vars(toy) != before[0]
        del layer.forward
        assert (dict(vars(toy)), dict(vars(layer)), toy.Layer.forward.__code__) == before
        assert layer.forward(5) == 6

    def test_defaults_and_keyword_defaults(self, toy):
        layer = toy.Layer()
        patch(layer, "forward", turn=minus)
        assert layer.forward(5, 3, shift=100) == 112

    def test_the_globals_stay_those_of_the_module(self, toy):
        layer = toy.Layer()
        patch(layer, "both", turn=minus)
        toy.scale = square
        assert layer.both(5) == 16
        assert layer.both.__func__.__globals__ is vars(toy)

    def test_names_can_be_swapped(self, toy):
        layer = toy.Layer()
        patch(layer, "both", turn=toy.scale, scale=toy.turn)
        assert layer.both(5) == 51

    def test_an_attribute_of_that_name_in_other_code_is_left_alone(self, toy):
        layer = toy.Layer()
        layer.turn = square
        patch(layer, "as_attribute_elsewhere", turn=minus)
        assert layer.as_attribute_elsewhere(5) == 4 + 25

    def test_nested_code_without_the_name_is_the_same_object(self, toy):
        code = toy.Layer.as_attribute_elsewhere.__code__
        copy = rebound(toy.Layer.as_attribute_elsewhere, {"turn": minus})
        nested = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        assert nested
        assert all(any(constant is theirs for theirs in copy.__code__.co_consts) for constant in nested)


class TestDecorators:
    def test_two_deep_with_arguments(self, toy):
        toy.Layer.forward = adding(5)(passing(toy.Layer.forward))
        one, other = toy.Layer(), toy.Layer()
        patch(one, "forward", turn=minus)
        assert one.forward(5) == 9
        assert other.forward(5) == 11
        del one.forward
        assert one.forward(5) == 11
        assert not aliases(toy)

    def test_wrapped_leads_to_the_copies(self, toy):
        inner = toy.Layer.forward
        outer = adding(5)(passing(inner))
        copy = rebound(outer, {"turn": minus})
        assert copy.__wrapped__ is not outer.__wrapped__
        assert copy.__wrapped__ is inspect.getclosurevars(copy).nonlocals["method"]
        innermost = inspect.unwrap(copy)
        assert innermost is not inner
        assert innermost(toy.Layer(), 5) == 4
        assert not hasattr(innermost, "__wrapped__")
        assert inspect.signature(copy) == inspect.signature(outer)

    def test_wrapped_of_what_is_not_copied_stays(self, toy):
        def stranger(self, x):
            return x

        toy.Layer.forward.__wrapped__ = stranger
        assert rebound(toy.Layer.forward, {"turn": minus}).__wrapped__ is stranger

    def test_what_a_decorator_noted_under_another_name_leads_to_the_copy(self, toy):
        outer = bare(toy.Layer.forward)
        outer.original, outer.note = toy.Layer.forward, ["unhashable"]
        copy = rebound(outer, {"turn": minus})
        assert copy.original(toy.Layer(), 5) == 4
        assert copy.note is outer.note

    def test_what_wraps_the_name_is_copied_and_nothing_else(self, toy):
        def helper(x):
            return x

        def outer(*args):
            return helper(inner(*args))

        inner = toy.Layer.forward
        held = inspect.getclosurevars(rebound(outer, {"turn": minus})).nonlocals
        assert held["helper"] is helper
        assert held["inner"] is not inner

    def test_other_closed_over_state_stays_shared(self, toy):
        seen = 0

        def wrapper(*args):
            nonlocal seen
            seen += 1
            return method(*args)

        method = toy.Layer.forward
        rebound(wrapper, {"turn": minus})(toy.Layer(), 5)
        wrapper(toy.Layer(), 5)
        assert seen == 2

    def test_an_unfilled_cell_is_no_obstacle(self, toy):
        def wrapper(*args):
            return method(*args) if args else missing

        method = toy.Layer.forward
        assert rebound(wrapper, {"turn": minus})(toy.Layer(), 5) == 4
        if wrapper is None:
            missing = None


class TestMetadata:
    def test_is_that_of_the_method(self, toy):
        method = toy.Layer.forward
        method.note = "ours"
        copy = rebound(method, {"turn": minus})
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__", "__defaults__"):
            assert getattr(copy, name) == getattr(method, name), name
        assert copy.__kwdefaults__ == {"shift": 0}
        assert vars(copy) == {"note": "ours"}
        assert copy.__doc__ == "What forward does."
        assert inspect.signature(copy) == inspect.signature(method)

    def test_keyword_defaults_are_not_shared(self, toy):
        rebound(toy.Layer.forward, {"turn": minus}).__kwdefaults__["shift"] = 7
        assert toy.Layer().forward(5) == 6

    @pytest.mark.skipif(sys.version_info < (3, 12), reason="syntax of 3.12")
    def test_type_parameters(self, toy):
        exec("def forward[T](self, x: T) -> T: return turn(x)", vars(toy))
        copy = rebound(toy.forward, {"turn": minus})
        assert copy.__type_params__ == toy.forward.__type_params__
        assert len(copy.__type_params__) == 1
        assert copy.__annotations__ == toy.forward.__annotations__

    def test_tracebacks_point_at_the_method_s_source(self, toy):
        def failing(x):
            raise LookupError

        copy = rebound(toy.Layer.forward, {"turn": failing})
        with pytest.raises(LookupError) as caught:
            copy(toy.Layer(), 5)
        frame = traceback.extract_tb(caught.value.__traceback__)[1]
        assert (Path(frame.filename).name, frame.name) == ("rebind_toy.py", "forward")
        assert frame.line == "return turn(x) * factor + shift"
        assert inspect.getsource(copy) == inspect.getsource(toy.Layer.forward)

    def test_pickle_brings_back_the_original(self, toy):
        layer = toy.Layer()
        patch(layer, "forward", turn=minus)
        assert pickle.loads(pickle.dumps(layer)).forward(5) == 6


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "opcode"),
        [
            ("as_attribute_too", "LOAD_ATTR"),
            ("as_method_too", "LOAD_(ATTR|METHOD)"),
            ("as_import_too", "IMPORT_NAME"),
        ],
    )
    def test_the_name_used_otherwise_in_the_same_code(self, toy, method, opcode):
        expected = (
            rf"cannot replace 'turn' in rebind_toy\.Layer\.{method}: {method} \(.*rebind_toy\.py:\d+\) "
            rf"also uses that name in another way \({opcode}\).* Replace the whole method instead\."
        )
        with pytest.raises(RebindError, match=expected):
            rebound(getattr(toy.Layer, method), {"turn": minus})
        assert not aliases(toy)

    @pytest.mark.parametrize("method", ["by_lambda", "by_function", "by_generator", "by_class", "later", "steps"])
    def test_code_that_may_outlive_the_copy(self, toy, method):
        with pytest.raises(RebindError, match="may run when the copy is gone"):
            rebound(getattr(toy.Layer, method), {"turn": minus})
        assert not aliases(toy)

    def test_a_closure_that_holds_its_own_function(self, toy):
        def counting(method):
            def wrapper(*args):
                wrapper.count = getattr(wrapper, "count", 0) + 1
                return method(*args)

            return wrapper

        with pytest.raises(RebindError, match="wrapper holds itself in a closure"):
            rebound(counting(toy.Layer.forward), {"turn": minus})

    def test_functions_that_hold_each_other(self, toy):
        def even(self, n):
            return odd(self, n - 1) if n else method(self, 5)

        def odd(self, n):
            return even(self, n - 1)

        method = toy.Layer.forward
        with pytest.raises(RebindError, match="holds itself in a closure"):
            rebound(even, {"turn": minus})

    def test_the_name_in_two_modules(self, toy, monkeypatch):
        def wrapper(*args):
            return turn(method(*args))  # noqa: F821  set below

        method = toy.Layer.forward
        monkeypatch.setitem(globals(), "turn", toy.turn)
        with pytest.raises(RebindError, match=r"wrapper and .*Layer\.forward look it up in different modules"):
            rebound(wrapper, {"turn": square})

    @pytest.mark.parametrize(
        ("method", "where", "opcode"),
        [
            ("writing", "writing", "STORE_GLOBAL"),
            ("writing_inside", "inner", "STORE_GLOBAL"),
            ("deleting", "deleting", "DELETE_GLOBAL"),
        ],
    )
    def test_a_method_that_changes_the_global(self, toy, method, where, opcode):
        why = rf"Layer\.{method}: {where} \(.*also uses that name in another way \({opcode}\)"
        with pytest.raises(RebindError, match=why):
            rebound(getattr(toy.Layer, method), {"turn": minus})

    @pytest.mark.parametrize("method", ["as_attribute_only", "as_local", "as_text"])
    def test_a_name_that_is_not_looked_up(self, toy, method):
        with pytest.raises(RebindError, match=rf"'turn' in .*{method}: that name is not looked up as a global"):
            rebound(getattr(toy.Layer, method), {"turn": minus})

    def test_one_bad_name_among_good_ones_leaves_nothing_behind(self, toy):
        with pytest.raises(RebindError, match="'rope'"):
            rebound(toy.Layer.both, {"turn": minus, "rope": minus})
        assert not aliases(toy)

    @pytest.mark.parametrize(
        ("method", "kind"),
        [
            (len, "builtin_function_or_method"),
            (str.join, "method_descriptor"),
            (functools.partial(minus), "partial"),
            (types.MethodType(minus, 1), "method"),
            (functools.lru_cache(minus), "_lru_cache_wrapper"),
        ],
    )
    def test_what_is_no_python_function(self, method, kind):
        with pytest.raises(RebindError, match=rf"it is a {kind}, not a Python function\."):
            rebound(method, {"turn": minus})

    @pytest.mark.parametrize("decorate", [lambda f: f, passing])
    def test_a_copy_of_a_copy(self, toy, decorate):
        copy = decorate(rebound(toy.Layer.both, {"turn": minus}))
        with pytest.raises(
            RebindError, match=r"'scale' in .*both: both \(.*belongs to a copy that was made here before"
        ):
            rebound(copy, {"scale": minus})


class TestLifetime:
    def test_one_copy_for_all(self, toy):
        layers = [toy.Layer() for _ in range(3)]
        for layer in layers:
            patch(layer, "forward", turn=minus)
        assert len({layer.forward.__func__ for layer in layers}) == 1
        assert len(aliases(toy)) == 1

    def test_the_order_of_the_names_makes_no_difference(self, toy):
        first = rebound(toy.Layer.both, {"turn": minus, "scale": square})
        assert rebound(toy.Layer.both, {"scale": square, "turn": minus}) is first

    def test_another_question_gets_another_copy(self, toy):
        copies = [
            rebound(toy.Layer.both, {"turn": minus}),
            rebound(toy.Layer.both, {"turn": square}),
            rebound(toy.Layer.both, {"scale": minus}),
            rebound(toy.Layer.both, {"turn": minus, "scale": minus}),
        ]
        assert len(set(copies)) == 4

    def test_the_alias_goes_with_the_last_user(self, toy):
        one, other = toy.Layer(), toy.Layer()
        patch(one, "forward", turn=minus)
        patch(other, "forward", turn=minus)
        del one.forward
        assert aliases(toy)
        assert other.forward(5) == 4
        del other.forward
        assert not aliases(toy)

    def test_the_alias_goes_with_a_dropped_instance(self, toy):
        patch(toy.Layer(), "forward", turn=minus)
        gc.collect()
        assert not aliases(toy)

    def test_nothing_is_kept_alive(self, toy):
        exec("def forward(self, x): return turn(x)", vars(toy))
        method, replacement = toy.forward, types.FunctionType(minus.__code__, {})
        copy = rebound(method, {"turn": replacement})
        watched = [weakref.ref(thing) for thing in (method, replacement, copy)]
        del toy.forward, method
        assert watched[0]() is None
        assert copy(None, 5) == 4
        del copy
        assert watched[2]() is None
        del replacement
        assert watched[1]() is None

    def test_an_inner_copy_that_outlives_the_outer_still_works(self, toy):
        inner = rebound(passing(toy.Layer.forward), {"turn": minus}).__wrapped__
        gc.collect()
        assert inner(toy.Layer(), 5) == 4
        del inner
        assert not aliases(toy)

    def test_a_recycled_id_is_not_taken_for_the_old_replacement(self, toy):
        ids = set()
        for amount in range(200):
            replacement = functools.partial(int.__add__, amount)
            ids.add(id(replacement))
            assert rebound(toy.Layer.forward, {"turn": replacement})(toy.Layer(), 0) == amount
            del replacement
        assert len(ids) < 200, "ids were to be recycled"

    def test_a_recycled_id_is_not_taken_for_the_old_method(self, toy):
        ids, copies = set(), []
        for amount in range(200):
            method = adding(amount)(toy.Layer.forward)
            ids.add(id(method))
            copies.append(rebound(method, {"turn": minus}))
            assert copies[-1](toy.Layer(), 0) == amount - 1
            del method
        assert len(ids) < 200, "ids were to be recycled"

    def test_500_cycles_leave_nothing_behind(self, toy):
        toy.Layer.forward = adding(5)(passing(toy.Layer.forward))

        def cycle():
            layers = [toy.Layer() for _ in range(2)]
            for layer in layers:
                patch(layer, "forward", turn=(lambda amount: lambda x: x - amount)(2))
                patch(layer, "both", turn=minus)
                assert (layer.forward(5), layer.both(5)) == (8, 40)
            del layers[0].forward, layers[0].both  # the garbage collector takes the other layer

        def counts():
            while gc.collect():  # finalizers of other tests may leave more garbage
                pass
            cached = sum(len(copies) for copies in rebind._copies.values())
            return len(vars(toy)), len(rebind._copies), cached, len(weakref.finalize._registry)

        cycle()
        before, objects = counts(), len(gc.get_objects())
        for _ in range(500):
            cycle()
        assert counts() == before
        assert len(gc.get_objects()) - objects < 50

    def test_threads_get_one_copy(self, toy):
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(20):
                barrier, copies = threading.Barrier(8), []

                def work(barrier=barrier, copies=copies):
                    barrier.wait()
                    copies.append(rebound(toy.Layer.both, {"turn": minus}))

                threads = [threading.Thread(target=work) for _ in range(8)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert len(copies) == 8
                assert len(set(copies)) == 1
                copies.clear()
        finally:
            sys.setswitchinterval(interval)

    def test_a_finalizer_may_ask_for_a_copy(self, toy, monkeypatch):
        class Asking:
            def __del__(self):
                answers.append(rebound(toy.Layer.both, {"turn": minus}))

        def get_instructions(code, original=dis.get_instructions):
            monkeypatch.setattr(dis, "get_instructions", original)
            Asking()
            return original(code)

        answers = []
        monkeypatch.setattr(rebind, "_opcodes", rebind._opcodes.__wrapped__)  # not cached, so that it reads the code
        monkeypatch.setattr(dis, "get_instructions", get_instructions)
        thread = threading.Thread(
            target=lambda: answers.append(rebound(toy.Layer.forward, {"turn": minus})), daemon=True
        )
        thread.start()
        thread.join(10)
        assert len(answers) == 2


def test_a_patched_object_still_works_while_the_process_exits():
    code = """
import atexit
turn = lambda x: x + 1
method = lambda x: turn(x)
atexit.register(lambda: print(copy(5)))
from fuseplug_verify.rebind import rebound
copy = rebound(method, {"turn": lambda x: x - 1})
"""
    command = [sys.executable, "-c", code]
    environ = {**os.environ, "PYTHONPATH": str(Path(rebind.__file__).parents[1])}
    assert subprocess.run(command, capture_output=True, text=True, env=environ, check=True).stdout == "4\n"
