"""LLaMA-Factory's kernel interface, offered by Fuseplug: code that uses it changes its imports, and nothing else.

>>> from fuseplug.interface import NpuRMSNormKernel, apply_default_kernels  # doctest: +SKIP
>>> model = apply_default_kernels(model=model, include_kernels="auto")  # doctest: +SKIP
>>> model = NpuRMSNormKernel.apply(model=model)  # doctest: +SKIP

The class of every installed or registered kernel can be imported from here by its name, and so can those functions of
LLaMA-Factory's kernels that are called in the same way here. If a kernel cannot be used on this machine, ``apply``
raises what `apply_kernel` raises. If a kernel cannot be loaded, or several kernels have a class of that name, the
import raises `DiscoveryError`. As in LLaMA-Factory, a kernel that fits nothing in the model is no error: a warning says
why, and the model is returned.

All calls go through `fuseplug.manager`. It verifies and reports these kernels as usual, and ``manager.undo(model)``
takes them off.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Unpack, cast, final

from .. import hookspecs, manager
from ..errors import DiscoveryError, RejectedError
from .by_class_name import FUNCTIONS, INSTEAD, class_named, ready_names
from .porting import how_to_port

if TYPE_CHECKING:
    from torch import nn

    from ..kernel_manager import K, Options

Function = TypeVar("Function", bound=Callable[..., Any])

__all__ = [
    "BaseKernel",
    "KernelPlugin",
    "apply_default_kernels",
    "apply_kernel",
    "get_default_kernels",
    "register_kernel",
    "scan_all_kernels",
]


class _OfTheClass:
    """A class attribute that is computed from the class."""

    def __init__(self, read: Callable[[type[hookspecs.BaseKernel]], Any]) -> None:
        self._read = read

    def __get__(self, _: object, kernel: type[hookspecs.BaseKernel]) -> Any:
        return self._read(kernel)


class BaseKernel(hookspecs.BaseKernel):
    """`fuseplug.BaseKernel` with LLaMA-Factory's ``apply``, ``_kernel_id`` and ``_device``."""

    _kernel_id = _OfTheClass(lambda kernel: kernel.kernel_id)
    _device = _OfTheClass(lambda kernel: next(iter(kernel.device_types), "cpu"))

    @final
    @classmethod
    def apply(cls, model: nn.Module, **options: Unpack[Options]) -> nn.Module:
        """Apply this kernel to *model*, as `apply_kernel` does.

        Raises:
            DiscoveryError: Also if another class has this kernel's id.
        """
        registered = scan_all_kernels().get(cls.kernel_id, cls)
        if registered is not cls:
            raise DiscoveryError(
                f"{cls.__qualname__} cannot be applied: kernel {cls.kernel_id!r} is "
                f"{registered.__module__}.{registered.__qualname__}; give yours another kernel_id and register it",
                kernel=cls,
            )
        return apply_kernel(cls.kernel_id, model, **options)


class _WithApply(BaseKernel):
    """The first base of every class that `_with_apply` makes."""

    def __init_subclass__(cls, **options: Any) -> None:
        # The kernel's own __init_subclass__ may require options or set attributes: it runs only for the kernel.
        if _WithApply not in cls.__bases__:
            super().__init_subclass__(**options)


@functools.cache
def _with_apply(kernel: type[hookspecs.BaseKernel]) -> type[BaseKernel]:
    """*kernel* if it has `BaseKernel.apply`; otherwise a subclass that adds `apply`, the same one at every call."""
    if issubclass(kernel, BaseKernel):
        return kernel
    same = {name: getattr(kernel, name) for name in ("__module__", "__qualname__", "__doc__")}
    double = types.new_class(kernel.__name__, (_WithApply, kernel), exec_body=lambda body: body.update(same))
    return cast("type[BaseKernel]", double)


def scan_all_kernels() -> dict[str, type[BaseKernel]]:
    """The classes of all kernels, installed or registered, that are ready to be applied somewhere, by id.

    Each is the kernel's own class or a subclass of it, has `BaseKernel.apply`, and is the same one at every call.
    """
    return {record.kernel_id: _with_apply(type(record.kernel)) for record in manager.kernels() if record.kernel}


def get_default_kernels() -> list[str]:
    """The ids of the kernels that run on a device of this machine and lack nothing there.

    Kernels for accelerators come before those for the CPU alone. Kernels for one device come in the order of
    preference: kernels that name the device first, then by priority, then by id.
    """
    from ..devices import KNOWN, present

    kernels = [record.kernel for record in manager.kernels() if record.kernel]
    named = {device_type for kernel in kernels for device_type in kernel.device_types}
    kernel_ids: list[str] = []
    for here in sorted(filter(present, KNOWN | named), key=lambda device_type: (device_type == "cpu", device_type)):
        usable = [kernel for kernel in kernels if kernel.runs_on(here) and kernel.lacks(here) is None]
        usable.sort(key=lambda kernel: (here not in kernel.device_types, -kernel.priority, kernel.kernel_id))
        kernel_ids += [kernel.kernel_id for kernel in usable]
    return list(dict.fromkeys(kernel_ids))


def apply_kernel(kernel_id: str, model: nn.Module, **options: Unpack[Options]) -> nn.Module:
    """Apply one kernel; warn if it is of no use in *model* or needs the user's consent.

    Args:
        kernel_id: The id of the kernel.
        model: Changed in place.
        **options: As in `KernelManager.plan`.

    Returns:
        *model*.

    Raises:
        DiscoveryError, PlanError: As `KernelManager.apply`.
        RejectedError: Instead of the warning, if the kernel is none of `get_default_kernels`, or with ``strict=True``.
    """
    return _apply([kernel_id], model, **options)


def _apply(kernel_ids: list[str], model: nn.Module, **options: Unpack[Options]) -> nn.Module:
    try:
        manager.apply(kernel_ids, model, **options)
    except RejectedError as error:
        if options.get("strict") or not {*kernel_ids} <= {*get_default_kernels()}:
            raise
        warnings.warn(f"{error}. The model is left as it is there.", stacklevel=3)
        if len(kernel_ids) > 1:
            manager.apply_all(model, include=kernel_ids, **options)
    return model


def register_kernel(kernel: K) -> K:
    """Add a kernel class, as `KernelManager.register` does. Usable as a decorator.

    Returns:
        The class that `scan_all_kernels` returns for it.

    Raises:
        DiscoveryError: As `KernelManager.register`; or if the class patches models itself, as LLaMA-Factory's do.
    """
    if remedy := how_to_port(kernel):
        raise DiscoveryError(f"cannot register {getattr(kernel, '__qualname__', kernel)}: {remedy}", kernel=kernel)
    return cast("K", _with_apply(manager.register(kernel)))


class KernelPlugin:
    """A function that applies kernels, under a name that a configuration can hold, such as ``"auto"``.

    Args:
        name: The name of the function.
    """

    _functions: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, name: str) -> None:
        self.name = name

    def register(self) -> Callable[[Function], Function]:
        """Return a decorator that registers a function under this name."""

        def keep(function: Function) -> Function:
            self._functions[self.name] = function
            return function

        return keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that is registered under this name.

        Raises:
            DiscoveryError: If none is registered.
        """
        function = self._functions.get(self.name)
        if function is None:
            raise DiscoveryError(
                f"no KernelPlugin is registered as {self.name!r}; there are: {', '.join(sorted(self._functions))}"
            )
        return function(*args, **kwargs)


@KernelPlugin("auto").register()
def apply_default_kernels(model: nn.Module, include_kernels: str | Sequence[str] | bool | None = None) -> nn.Module:
    """Apply kernels as a configuration says.

    Args:
        model: Changed in place.
        include_kernels: ``"auto"`` or ``True`` for every kernel that fits; ids, in a sequence or separated by commas,
            for these kernels, with a warning as in `apply_kernel`; ``None`` or ``False`` for no kernel.

    Returns:
        *model*.

    Raises:
        DiscoveryError, RejectedError, PlanError: As `KernelManager.apply_all` and, for ids, `apply_kernel`.
    """
    if include_kernels is True or include_kernels == "auto":
        manager.apply_all(model)
    elif include_kernels:
        kernel_ids = include_kernels.split(",") if isinstance(include_kernels, str) else include_kernels
        _apply([kernel_id.strip() for kernel_id in kernel_ids], model)
    return model


def __getattr__(name: str) -> Any:
    # Python asks for __path__ at every import from here, and that must not load the kernels.
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in FUNCTIONS:
        return hookspecs.resolve(FUNCTIONS[name])
    records = manager.kernels()
    kernel = class_named(name, records)
    if kernel is None:
        ready = ", ".join(ready_names(records)) or "none"
        instead = INSTEAD.get(name, f"; the kernels that are ready: {ready} (see `fuseplug list`)")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    return _with_apply(kernel)


def __dir__() -> list[str]:
    return sorted({*globals(), *ready_names(manager.kernels())})
