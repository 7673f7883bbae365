"""Imports of an installed kernel's class from `fuseplug.interface`, in each state that the kernel can be in."""

import pytest

from fuseplug import DiscoveryError, KernelManager, interface


@pytest.fixture
def use(monkeypatch):
    """Let the interface see the test's distributions, under the environment variables that are given."""

    def use(**environ):
        variables = {"ALLOW": "x-odd,x-even", **environ}
        manager = KernelManager({f"FUSEPLUG_{name}": value for name, value in variables.items()})
        monkeypatch.setattr("fuseplug.interface.manager", manager)

    return use


def test_ready(package, use):
    package("x-odd", "odd")
    use()
    import x_odd

    assert issubclass(interface.Kernel, x_odd.Kernel)
    assert interface.Kernel is interface.scan_all_kernels()["odd"]
    assert "Kernel" in dir(interface)


EXTRA = {"extras": "[npu]", "requires": ("not-there>=2; extra == 'npu'",)}
NO_EXTRA = r'is not installed: needs not-there>=2 \(not installed\): pip install "x-odd\[npu\]"'


@pytest.mark.parametrize(
    ("options", "environ", "reason"),
    [(EXTRA, {}, NO_EXTRA), ({}, {"KERNELS": "-odd"}, "is off: FUSEPLUG_KERNELS leaves it out")],
    ids=["not installed", "off"],
)
def test_not_usable_here_is_said_when_it_is_applied(package, use, model, options, environ, reason):
    package("x-odd", "odd", **options)
    use(**environ)
    from fuseplug.interface import Kernel

    assert Kernel is interface.Kernel
    assert "odd" not in interface.scan_all_kernels()
    with pytest.raises(DiscoveryError, match=f"kernel x-odd:odd was asked for by name, but {reason}"):
        Kernel.apply(model=model)


@pytest.mark.parametrize(
    ("options", "environ", "reason"),
    [
        ({"source": "1 / 0"}, {}, "is broken: ZeroDivisionError: division by zero"),
        ({"requires": ("not-there>=2",)}, {}, "is missing: needs not-there>=2"),
        ({}, {"ALLOW": ""}, "is not allowed: FUSEPLUG_ALLOW does not name x-odd"),
        ({"source": "1 / 0"}, {"KERNELS": "-odd"}, "is off: FUSEPLUG_KERNELS leaves it out"),
    ],
    ids=["broken", "missing", "not allowed", "off and broken"],
)
def test_not_loadable_is_said_when_it_is_imported(package, use, options, environ, reason):
    package("x-odd", "odd", **options)
    use(**environ)
    with pytest.raises(DiscoveryError, match=f"Kernel cannot be imported: kernel x-odd:odd {reason}"):
        from fuseplug.interface import Kernel  # noqa: F401
    assert "Kernel" not in dir(interface)


def test_the_environment_chooses_between_two_of_one_name(package, use):
    package("x-even", "even")
    package("x-odd", "odd", **EXTRA)
    use()
    with pytest.raises(DiscoveryError, match=r"x-even:even and x-odd:odd.* FUSEPLUG_KERNELS=-x-odd:odd"):
        from fuseplug.interface import Kernel  # noqa: F401
    assert "Kernel" not in dir(interface)
    use(KERNELS="-x-odd:odd")
    assert interface.Kernel.kernel_id == "even"
    assert "Kernel" in dir(interface)
