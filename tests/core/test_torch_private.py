"""What the `torch_private` modules claim about torch's private names, checked with the installed torch."""

import inspect
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from support import transforms
from support.promises import Promised
from support.thorough import thorough
from torch.nn import functional
from torch.nn.modules import module as hooks
from torch.testing import assert_close

from fuseplug import torch_private as of_core
from fuseplug_backends import torch_private as of_backends
from fuseplug_backends.torch_private import inductor
from fuseplug_linear_cross_entropy import torch_private as of_lazy_tensors
from fuseplug_testing import torch_private as of_the_kit
from fuseplug_tools import torch_private as of_tools
from fuseplug_verify import torch_private as of_verify

HOMES = (of_core, of_verify, of_tools, of_backends, of_lazy_tensors, of_the_kit)
private = SimpleNamespace(**{name: getattr(home, name) for home in HOMES for name in home.__all__})
X = torch.arange(1.0, 7.0).view(2, 3)
TRANSFORMS = {
    "vmap": lambda f: torch.func.vmap(f)(X),
    "grad": lambda f: torch.func.grad(lambda x: f(x).sum())(X),
    "jvp": lambda f: torch.func.jvp(f, (X,), (X,)),
}
TESTED = set()
ELSEWHERE = {
    "tests/backends/test_compiled.py": {
        *("Recording", "compiled_by_inductor", "forget_vectors", "recorded", "trust_vectors"),
    },
    "tests/backends/test_tracing.py": {
        *("FakeTensor", "get_unwrapped", "in_forward_mode", "is_batchedtensor", "is_functorch_wrapped_tensor"),
        *("is_legacy_batchedtensor", "len_torch_dispatch_stack", "peek_interpreter_stack"),
    },
    "tests/conformance/test_importing.py": {"len_torch_function_stack"},
    "tests/linear_cross_entropy/test_lazy_tensor.py": {
        *("DisableTorchFunctionSubclass", "disable_current_modes", "function_modes_off", "has_foreign_function_mode"),
        *("is_fwd_grad_enabled", "swap_values", "without_memory"),
    },
}
"""Members that are tested with the code that uses them, by the file of the tests."""
MISCOMPILES_FUNCTIONS = private.MISCOMPILES_FUNCTIONS


def of(*names):
    """Mark a test as the test of these members."""
    TESTED.update(names)
    return lambda test: test


@of("traced_away")
def test_what_is_traced_away_runs_while_tracing_and_leaves_nothing():
    ran, graphs = [], []

    @private.traced_away
    def note():
        ran.append(1)
        return True

    def function(x):
        return x * 2 if note() else x

    def backend(graph, _):
        graphs.append([node.op for node in graph.graph.nodes])
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        assert_close(compiled(X), 2 * X)
    assert (len(ran), graphs) == (1, [["placeholder", "call_function", "output"]])


class Written(torch.autograd.Function):
    """``2 x``, computed by writing into its result."""

    @staticmethod
    def forward(ctx, x):
        return x.clone().mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


@of("MISCOMPILES_FUNCTIONS")
def test_a_function_is_compiled_without_its_gradient_by_one_release_alone():
    x = X.clone().requires_grad_()
    torch.compiler.reset()
    torch.compile(Written.apply, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert torch.equal(x.grad, torch.full_like(X, 2)) != MISCOMPILES_FUNCTIONS


def test_every_member_is_tested():
    assert {*vars(private), *inductor.__all__} == TESTED.union(*ELSEWHERE.values())


def test_what_several_have_is_the_same():
    for name in vars(private):
        members = [getattr(home, name) for home in HOMES if hasattr(home, name)]
        texts = {inspect.getsource(member) if inspect.isfunction(member) else repr(member) for member in members}
        assert len(texts) == 1, name


@of("is_transformed")
@pytest.mark.parametrize("transform", transforms.TRANSFORMS.values(), ids=transforms.TRANSFORMS)
def test_what_is_transformed_is_seen_there_and_nowhere_else(transform):
    seen = []
    transform(lambda x: seen.append(private.is_transformed()) or x * 1)(X)
    assert (set(seen), private.is_transformed()) == ({True}, False)


@of("temporarily_clear_interpreter_stack")
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_is_computed_with_the_transforms_taken_off_is_no_tensor_of_theirs(transform):
    found = []

    def inside(x):
        with private.temporarily_clear_interpreter_stack():
            made = X * 2
        found.append((private.is_functorch_wrapped_tensor(made), private.peek_interpreter_stack() is not None))
        return x * 1

    TRANSFORMS[transform](inside)
    assert found == [(False, True)]


@of("reinterpret_tensor")
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_reinterpreted_tensor_shares_memory_and_is_no_view(mode):
    parameter = torch.nn.Parameter(torch.arange(12.0))
    x = parameter.detach()[2:8]
    with mode():
        y = private.reinterpret_tensor(x, (3, 2), (1, 3))
        z = private.reinterpret_tensor(parameter, (12,), (1,))
        assert y.is_inference() == torch.is_inference_mode_enabled()
    assert_close(y, x.view(2, 3).t())
    assert (y.data_ptr(), y.storage_offset(), y._is_view()) == (x.data_ptr(), 2, False)
    assert (type(z), z.requires_grad, z._is_view()) == (torch.Tensor, False, False)


@of("storage_id")
def test_tensors_on_one_storage_share_its_id():
    one, other = torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")
    assert private.storage_id(one) == private.storage_id(one.t()) == private.storage_id(one.detach()[1:])
    assert private.storage_id(one) != private.storage_id(other)


@of("writes_to")
def test_a_schema_says_what_is_written_to():
    assert private.writes_to(torch.ops.aten.add_.Tensor) == [True, False, False]
    assert private.writes_to(torch.ops.aten.add.Tensor) == [False, False, False]
    assert private.writes_to(torch.ops.aten.add.out) == [False, False, False, True]


REGISTER = (
    hooks.register_module_forward_hook,
    hooks.register_module_forward_pre_hook,
    hooks.register_module_full_backward_hook,
    hooks.register_module_full_backward_pre_hook,
)


@of("GLOBAL_HOOKS")
def test_hooks_of_every_module_are_there_while_they_are_registered():
    for place, register in enumerate(REGISTER):
        handle = register(lambda *_: None)
        counts = [len(each) for each in private.GLOBAL_HOOKS]
        handle.remove()
        assert counts == [int(place == number) for number in range(4)]
    assert not any(private.GLOBAL_HOOKS)


@of("get_printoptions")
def test_print_options_are_those_that_were_set():
    before = private.get_printoptions()
    torch.set_printoptions(precision=7, sci_mode=True)
    try:
        found = private.get_printoptions()
        assert (found["precision"], found["sci_mode"]) == (7, True)
    finally:
        torch.set_printoptions(precision=before["precision"], sci_mode=before["sci_mode"])
    assert private.get_printoptions() == before != found


@of("tree_flatten", "tree_leaves", "tree_map", "tree_unflatten")
def test_pytree_goes_through_what_is_registered():
    class Pair:
        def __init__(self, *items):
            self.items = list(items)

    from torch.utils import _pytree

    assert private.tree_leaves(Pair(1, 2)) != [1, 2]
    _pytree.register_pytree_node(Pair, lambda pair: (pair.items, None), lambda items, _: Pair(*items))
    value = {"a": [1, (2, None)], "b": Pair(3, 4)}
    leaves, structure = private.tree_flatten(value)
    assert leaves == private.tree_leaves(value) == [1, 2, None, 3, 4]
    assert private.tree_map(str, value)["b"].items == ["3", "4"]
    assert private.tree_unflatten("abcde", structure)["a"] == ["a", ("b", "c")]


@of("has_onednn_linear", "onednn_linear")
@pytest.mark.skipif(not private.has_onednn_linear(), reason="this torch is built without oneDNN's linear")
def test_onednn_multiplies():
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    assert_close(private.onednn_linear(x, weight), functional.linear(x, weight))
    assert_close(private.onednn_linear(x, torch.randn(7, 3).t().copy_(weight)), functional.linear(x, weight))


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("end", ["keep", "fail"])
def test_what_is_built_elsewhere_is_waited_for(end):
    from torch._inductor.async_compile import AsyncCompile

    builders, own = Promised(), AsyncCompile.cpp_pybinding
    factor = 3 if end == "keep" else 5  # Inductor would reuse a program that it has built in this process
    found = inductor.recorded(lambda x: [x * factor], [torch.ones(4, 3)], [(0,)])
    run, wait = inductor.compiled_by_inductor(found, builders.begin)
    assert len(builders.promised) == 1
    assert AsyncCompile.cpp_pybinding is own
    getattr(builders, end)()
    wait()
    x = torch.randn(7, 3)
    assert_close([*run(x)], [x * factor])


@thorough
@of("compile_header")
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_the_shared_header_is_that_of_the_programs(fresh_python, tmp_path):
    from torch._inductor import config

    if not getattr(config, "cpp_cache_precompile_headers", False):
        pytest.skip("this torch compiles no header for all programs")
    code = """
import torch
from torch._inductor import codecache
from fuseplug_backends.torch_private import inductor
made, headers = codecache._precompile_header, []
codecache._precompile_header = lambda *args, **how: headers.append(args) or made(*args, **how)
cache = codecache.CppPythonBindingsCodeCache
own, cache._load_library = cache._load_library, None  # no program is built for it
inductor.compile_header()
(first,) = headers
cache._load_library = own
run, _ = inductor.compiled_by_inductor(inductor.recorded(lambda x: [x * 17], [torch.ones(4, 3)], [(0,)]))
assert headers == [first, first]
"""
    done = fresh_python(code, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("function", [lambda x: [x], lambda x: [x.view(3, -1)], lambda x: [y := x + 1, y[0]]])
def test_results_that_share_memory_are_refused(function):
    with pytest.raises(TypeError, match=r"its results share memory with its arguments or each other.*return a clone"):
        inductor.recorded(function, [torch.ones(4, 3)], [(0,)])


@thorough
@of("import_dynamo", "DYNAMO_SETTINGS", "INDUCTOR_SETTINGS")
def test_what_is_imported_and_when(fresh_python):
    code = """
import importlib, sys
import fuseplug.torch_private, fuseplug_verify.torch_private, fuseplug_tools.torch_private
import fuseplug_backends.torch_private, fuseplug_linear_cross_entropy.torch_private
from fuseplug_testing import torch_private as private
assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()
private.import_dynamo()
assert "torch._dynamo" in sys.modules
for name in (private.DYNAMO_SETTINGS, private.INDUCTOR_SETTINGS):
    assert importlib.import_module(name).get_config_copy()
"""
    done = fresh_python(code)
    assert done.returncode == 0, done.stderr


@of("OPERATIONS", "writes")
def test_operations_say_what_they_write_to():
    add, add_ = torch.ops.aten.add, torch.ops.aten.add_
    assert all(isinstance(op, private.OPERATIONS) for op in (add, add.Tensor, add_, add_.Tensor))
    assert [private.writes(op) for op in (add, add.Tensor, add_, add_.Tensor)] == [True, False, True, True]
    assert not private.writes(torch.ops.aten.mm.default)


@of("DYNAMO_WRAPPERS")
def test_decorators_of_dynamo_are_written_there():
    decorated = (torch.compiler.disable(lambda x: x), torch.compile(lambda x: x), torch.optim.SGD.zero_grad)
    assert all(each.__globals__["__name__"].startswith(private.DYNAMO_WRAPPERS) for each in decorated)


@of("default_store")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed")
def test_the_store_is_that_with_which_the_ranks_met():
    met = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=met, rank=0, world_size=1)
    try:
        store = private.default_store()
        store.set("said", "here")
        assert store.get("said") == b"here"
        assert store.compare_set("decided", "", "first") == store.compare_set("decided", "", "second") == b"first"
    finally:
        torch.distributed.destroy_process_group()


@of("inductor_threads")
@thorough
@pytest.mark.parametrize("said", ["3", None])
def test_as_many_compilers_as_inductor_would_run(fresh_python, monkeypatch, said):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    code = """
import sys
from fuseplug_backends.torch_private.inductor import inductor_threads
guessed = inductor_threads()
assert "torch._inductor" not in sys.modules
from torch._inductor import async_compile
assert guessed == async_compile.get_compile_threads()
"""
    done = fresh_python(code, **({} if said is None else {"TORCHINDUCTOR_COMPILE_THREADS": said}))
    assert done.returncode == 0, done.stderr


@of("prepare_recording")
@pytest.mark.parametrize("gpu", [False, True])
def test_what_a_fake_mode_does_first_is_done_by_the_thread_that_asks(monkeypatch, gpu):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: asked.append(threading.get_ident()), False)
    inductor.prepare_recording()
    assert asked == ([] if gpu else [threading.get_ident()])


ALIASES = sorted(name for name in vars(private) if type(getattr(private, name)) is type(len))


@pytest.mark.parametrize("name", ALIASES)
def test_what_is_asked_at_each_call_is_torchs_own(name):
    function = getattr(private, name)
    homes = [(torch._C, f"_{name}"), (torch._C._functorch, name), (torch._C._dynamo.guards, f"_{name}")]
    assert function in [getattr(home, own, None) for home, own in homes]
