"""Code that uses LLaMA-Factory's kernel interface works with new imports; a kernel written for it is refused."""

import warnings
from dataclasses import replace

import pytest
from support.kernels import NormKernel, RotaryKernel, variant_of

import fuseplug
from fuseplug import Consent, DiscoveryError, PlanError, RejectedError, interface
from fuseplug.interface import (
    BaseKernel,
    KernelPlugin,
    apply_default_kernels,
    apply_kernel,
    get_default_kernels,
    register_kernel,
    scan_all_kernels,
)
from fuseplug.interface import manager as the_manager
from fuseplug.interface.by_class_name import FUNCTIONS, INSTEAD
from fuseplug.patching import our_marks

pytestmark = pytest.mark.usefixtures("checked_once")


@pytest.fixture(autouse=True)
def _manager(fusing, monkeypatch):
    monkeypatch.setattr("fuseplug.interface.manager", fusing)


def fused_by(manager, model):
    applied = manager.applied_to(model)
    return set() if applied is None else {entry.kernel_id for entry in applied.report.fused}


BOTH = {"toy_norm", "toy_rotary"}


def test_all_kernels_are_there_by_id():
    assert scan_all_kernels() == {"toy_norm": interface.NormKernel, "toy_rotary": interface.RotaryKernel}
    assert issubclass(interface.NormKernel, NormKernel)
    assert issubclass(interface.RotaryKernel, RotaryKernel)
    assert scan_all_kernels().keys() == BOTH


def test_default_kernels_are_those_that_run_here(monkeypatch):
    monkeypatch.setattr("fuseplug.devices.present", lambda device_type: device_type == "cpu")
    register_kernel(variant_of(NormKernel, "elsewhere", device_types=("npu",)))
    register_kernel(variant_of(NormKernel, "lacking", unavailable=lambda self, device_type: "a chip"))
    assert get_default_kernels() == ["toy_norm", "toy_rotary"]


def test_default_kernels_are_in_the_order_of_preference(monkeypatch):
    monkeypatch.setattr("fuseplug.devices.present", lambda device_type: device_type in ("cpu", "npu"))
    register_kernel(variant_of(NormKernel, "a_for_the_cpu", device_types=("cpu",)))
    register_kernel(variant_of(NormKernel, "for_the_npu", device_types=("npu",)))
    register_kernel(variant_of(NormKernel, "z_important", priority=1))
    assert get_default_kernels() == ["for_the_npu", "z_important", "toy_norm", "toy_rotary", "a_for_the_cpu"]


def test_one_kernel(fusing, model):
    assert apply_kernel("toy_norm", model=model) is model
    assert fused_by(fusing, model) == {"toy_norm"}
    fusing.undo(model)
    assert fused_by(fusing, model) == set()


def test_a_kernel_by_its_class(fusing, model):
    assert interface.NormKernel.apply(model=model) is model
    assert fused_by(fusing, model) == {"toy_norm"}


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("auto", BOTH),
        (True, BOTH),
        ("toy_norm", {"toy_norm"}),
        ("toy_norm, toy_rotary", BOTH),
        (["toy_rotary"], {"toy_rotary"}),
        (None, set()),
        (False, set()),
        ("", set()),
        ([], set()),
    ],
)
@pytest.mark.parametrize("function", [apply_default_kernels, KernelPlugin("auto")])
def test_kernels_as_a_configuration_says(fusing, model, function, include, expected):
    assert function(model=model, include_kernels=include) is model
    assert fused_by(fusing, model) == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda model: apply_kernel("nothing", model=model),
        lambda model: apply_default_kernels(model=model, include_kernels="toy_norm,nothing"),
        lambda model: KernelPlugin("auto")(model=model, include_kernels=["nothing"]),
    ],
)
def test_an_unknown_kernel_is_refused_with_those_there_are(fusing, model, call):
    with pytest.raises(DiscoveryError, match=r"'nothing' is installed; .*toy_norm.*toy_rotary"):
        call(model)
    assert fused_by(fusing, model) == set()


def test_a_kernel_for_another_machine_is_refused(model):
    register_kernel(variant_of(NormKernel, "elsewhere", device_types=("npu",)))
    with pytest.raises(RejectedError, match="elsewhere"):
        apply_kernel("elsewhere", model=model)
    with pytest.raises(RejectedError, match="elsewhere"):
        apply_default_kernels(model, "toy_norm,elsewhere")


def needing_consent(self, site):
    consent = Consent("toy_word", "what the toy gives up")
    return [replace(proposal, consent=consent) for proposal in NormKernel().match(site) or ()]


OF_NO_USE = {
    "idle": ({"match": lambda self, site: None}, "this model has no module with this op"),
    "asking": ({"match": needing_consent}, r'it needs your consent, allow=\["toy_word"\]'),
}


@pytest.mark.parametrize("name", OF_NO_USE)
def test_a_kernel_that_is_of_no_use_is_warned_of(fusing, model, name):
    declared, why = OF_NO_USE[name]
    kernel = register_kernel(variant_of(NormKernel, name, **declared))
    before = model.state_dict().keys()
    for call in (lambda: apply_kernel(name, model=model), lambda: kernel.apply(model=model)):
        with pytest.warns(UserWarning, match=why):
            assert call() is model
    assert (fused_by(fusing, model), model.state_dict().keys()) == (set(), before)
    with pytest.raises(RejectedError, match=why):
        apply_kernel(name, model=model, strict=True)
    with pytest.warns(UserWarning, match=why):
        assert apply_default_kernels(model, f"toy_rotary,{name}") is model
    assert fused_by(fusing, model) == {"toy_rotary"}


def test_all_default_kernels_can_be_applied_in_a_loop(fusing, model):
    for name, (declared, _) in OF_NO_USE.items():
        register_kernel(variant_of(NormKernel, name, **declared))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for kernel_id in get_default_kernels():
            model = apply_kernel(kernel_id, model=model)
    assert len(warned) == len(OF_NO_USE)
    assert {mark.kernel_id for module in model.modules() for mark in our_marks(module).values()} == BOTH


@pytest.mark.parametrize(
    "call", [lambda: apply_kernel("toy_norm"), lambda: interface.NormKernel.apply(), apply_default_kernels]
)
def test_a_missing_model_is_named(call):
    with pytest.raises(TypeError, match="'model'"):
        call()


def test_what_is_no_model_is_refused():
    with pytest.raises(PlanError, match="expected a torch"):
        apply_kernel("toy_norm", model="a name")


def test_options_are_those_of_the_manager(fusing, model):
    interface.NormKernel.apply(model=model, only="norm")
    assert [entry.paths for entry in fusing.applied_to(model).report.fused] == [("norm",)]


def test_a_class_is_applied_only_under_an_id_of_its_own(model):
    with pytest.raises(DiscoveryError, match=r"'toy_norm' is support\.kernels\.NormKernel"):
        variant_of(interface.NormKernel, "toy_norm").apply(model=model)
    with pytest.raises(DiscoveryError, match="'unregistered'"):
        variant_of(interface.NormKernel, "unregistered").apply(model=model)


def test_a_kernel_is_registered_by_a_decorator(fusing, model):
    @register_kernel
    class Norm(NormKernel):
        kernel_id = "another_norm"
        priority = 1

    assert scan_all_kernels()["another_norm"] is Norm
    apply_default_kernels(model, "auto")
    assert fused_by(fusing, model) == {"another_norm", "toy_rotary"}


def test_a_plugin_stands_for_a_function(monkeypatch):
    monkeypatch.setattr(KernelPlugin, "_functions", dict(KernelPlugin._functions))

    @KernelPlugin("mine").register()
    def mine(model):
        return [model]

    assert KernelPlugin("mine")("a model") == ["a model"]
    assert mine(1) == [1]
    with pytest.raises(DiscoveryError, match="'theirs'; there are: auto, mine"):
        KernelPlugin("theirs")(1)


class Theirs:
    _kernel_id = "theirs"
    _device = "npu"

    @classmethod
    def apply(cls, **kwargs):
        return kwargs["model"]


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (Theirs, "with _kernel_id and _device: derive it from fuseplug.BaseKernel"),
        (type("Mixed", (Theirs, BaseKernel), {}), "with _kernel_id and _device and an apply\\(\\) of its own"),
        (type("Mixed", (Theirs, fuseplug.BaseKernel), {}), "with _kernel_id and _device and an apply\\(\\) of its own"),
        (type("Own", (NormKernel,), {"apply": Theirs.apply}), "with an apply\\(\\) of its own"),
        (type("Own", (BaseKernel,), {"apply": Theirs.apply}), "with an apply\\(\\) of its own"),
    ],
)
def test_a_kernel_written_for_the_other_interface_says_how_to_port_it(kernel, said):
    with pytest.raises(DiscoveryError, match=f"LLaMA-Factory's interface, {said}"):
        register_kernel(kernel)


class TestClasses:
    """The classes that `scan_all_kernels` and an import by name give."""

    def test_are_the_kernels_own_with_apply(self):
        found = scan_all_kernels()["toy_norm"]
        assert issubclass(found, NormKernel)
        assert issubclass(found, BaseKernel)
        assert issubclass(found, fuseplug.BaseKernel)
        for name in ("__name__", "__qualname__", "__module__", "__doc__", "kernel_id", "match"):
            assert getattr(found, name) is getattr(NormKernel, name)
        assert not hasattr(NormKernel, "apply")

    def test_have_the_names_of_the_other_interface(self):
        found = scan_all_kernels()["toy_norm"]
        assert (found._kernel_id, found._device) == ("toy_norm", "cpu")
        elsewhere = register_kernel(variant_of(NormKernel, "elsewhere", device_types=("npu", "cuda")))
        assert (elsewhere._kernel_id, elsewhere()._device) == ("elsewhere", "npu")
        assert BaseKernel._device == "cpu"

    def test_are_made_once(self, fusing):
        from fuseplug.interface import NormKernel as Found

        fusing.refresh()
        assert scan_all_kernels()["toy_norm"] is Found is interface.NormKernel

    def test_are_made_of_a_kernel_that_requires_options_of_its_subclasses(self):
        class Strict(NormKernel):
            def __init_subclass__(cls, *, kernel_id, **options):
                super().__init_subclass__(**options)
                cls.kernel_id = kernel_id

        class First(Strict, kernel_id="first"): ...

        register_kernel(First)
        assert interface.First.kernel_id == "first"

        class Second(interface.First, kernel_id="second"): ...

        assert register_kernel(Second) is interface.Second is Second
        assert Second.kernel_id == "second"

    @pytest.mark.parametrize("register", [register_kernel, lambda kernel: interface.manager.register(kernel)])
    def test_an_author_derives_one_from_the_base_of_here(self, fusing, model, register):
        class Mine(BaseKernel):
            kernel_id = "mine"
            op, function, reference = NormKernel.op, NormKernel.function, NormKernel.reference

            def match(self, site):
                return NormKernel().match(site)

        assert register(Mine) is Mine is scan_all_kernels()["mine"] is interface.Mine
        assert Mine.apply(model=model) is model
        assert fused_by(fusing, model) == {"mine"}

    def test_an_unknown_name_is_answered_with_those_there_are(self):
        said = r"module 'fuseplug.interface' has no attribute 'Nothing'; the kernels that are ready: NormKernel, Rot"
        with pytest.raises(AttributeError, match=said):
            _ = interface.Nothing
        with pytest.raises(ImportError, match=r"cannot import name 'Nothing' from 'fuseplug.interface'"):
            from fuseplug.interface import Nothing  # noqa: F401

    def test_names_of_pythons_own_load_nothing(self, monkeypatch):
        monkeypatch.setattr(interface.manager, "kernels", lambda: pytest.fail("it looked for kernels"))
        assert not hasattr(interface, "__wrapped__")
        assert not hasattr(interface, "_private")

    def test_two_of_one_name_are_refused_by_both_their_names(self):
        fuseplug.interface.manager.register(type("NormKernel", (NormKernel,), {"kernel_id": "namesake"}))
        said = (
            r"NormKernel is the class name of the kernels \(registered\):namesake and \(registered\):toy_norm: .* "
            r"FUSEPLUG_KERNELS=-\(registered\):toy_norm"
        )
        with pytest.raises(DiscoveryError, match=said):
            from fuseplug.interface import NormKernel as _  # noqa: F401
        assert {scan_all_kernels()[kernel_id].__name__ for kernel_id in ("toy_norm", "namesake")} == {"NormKernel"}
        assert "NormKernel" not in dir(interface)

    def test_are_in_dir(self):
        assert {"NormKernel", "RotaryKernel", *interface.__all__} <= set(dir(interface))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_other_project_are_there(name):
    assert getattr(interface, name).__name__ == name


@pytest.mark.parametrize(("name", "said"), INSTEAD.items())
def test_what_takes_the_place_of_others_is_said(name, said):
    with pytest.raises(AttributeError) as raised:
        getattr(interface, name)
    assert str(raised.value) == f"module 'fuseplug.interface' has no attribute {name!r}{said}"


def test_it_is_the_one_manager():
    assert the_manager is fuseplug.manager
