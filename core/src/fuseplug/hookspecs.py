"""The contract of a kernel: one class to subclass, which is also the pluggy hookspec."""

from __future__ import annotations

import abc
import importlib
import inspect
import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, final

import pluggy

from .contract import Adapter, Answer, Compute, Proposal, Rejection, Site, Target

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Unpack

    from .kernel_manager import Options

PROJECT = "fuseplug"
ENTRY_POINT_GROUP = "fuseplug.kernels"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class BaseKernel(abc.ABC):
    """One fused implementation of one op. Subclass it in a module that imports no torch.

    A kernel is declared as data and answers one question, `match`. It never touches a model: Fuseplug checks it,
    applies it, takes it off and reports it, the same way for everybody.

    Attributes:
        kernel_id: The kernel's name everywhere; equal to the name of its entry point.
        op: What it computes, in the field's words: ``"rmsnorm"``, ``"swiglu"``, ``"rope"``, ``"moe"`` or your own.
        function: ``"package.module:function"`` that computes it; imported when the kernel is chosen, not before.
        reference: ``"package.module:function"`` in plain PyTorch with the same signature: the definition of right. It
            must compute in ``promote(x.dtype, float32)``, so that float64 inputs give the truth.
        specimens: ``"package.module:function"`` that returns small modules which the kernel fuses, at least one for
            each variant that it claims: what `fuseplug_testing` checks it on. Optional, and inherited.
        device_types: Where it runs; empty for every device.
        differentiable: Whether gradients flow through it. If not, it is used only for ``mode="inference"``.
        compilable: Whether ``torch.compile`` can trace through it.
        priority: Among kernels equally specific to a device the higher one is preferred.
        check_sizes: Numbers of elements at which the kernel is checked on its device. Name more than one where it takes
            different paths for small and large inputs.
    """

    kernel_id: ClassVar[str]
    op: ClassVar[str]
    function: ClassVar[str]
    reference: ClassVar[str]
    specimens: ClassVar[str] = ""
    device_types: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[bool] = True
    compilable: ClassVar[bool] = True
    priority: ClassVar[int] = 0
    check_sizes: ClassVar[tuple[int, ...]] = (512, 1 << 17)

    @abc.abstractmethod
    def match(self, site: Site) -> Iterable[Proposal] | Rejection | None:
        """Say what this kernel would replace at *site*.

        Returns:
            Proposals, one per target; a `Rejection` if the site is this kernel's business but cannot be served;
            ``None`` if it is none of its business.
        """

    def unavailable(self, device_type: str) -> str | None:
        """Return what this machine lacks to run the kernel on *device_type*, with the remedy; ``None`` if nothing."""
        del device_type
        return None

    def caveat(self, device_type: str) -> str | None:
        """Return what makes it doubtful whether the kernel is right on *device_type* here; ``None`` if nothing does.

        ``fuseplug doctor`` shows it. It keeps no kernel from being used: each is checked on the device.
        """
        del device_type
        return None

    def unsupported(self, adapter: Adapter) -> str | None:
        """Return why this kernel does not compute what *adapter* stands for, a variant of the op; ``None`` if it does.

        Asked once the variant of a site was found by running it. The base of an op may recognise more variants than
        one implementation of it serves.
        """
        del adapter
        return None

    @final
    @classmethod
    def apply(cls, model: nn.Module, **options: Unpack[Options]) -> nn.Module:
        """Have `fuseplug.manager` apply this kernel to *model*, as `fuseplug.interface.apply_kernel` says."""
        # By name: what applies kernels is built on what a kernel is.
        applied: nn.Module = resolve("fuseplug.interface:apply_class")(cls, model, **options)
        return applied

    @final
    def runs_on(self, device_type: str) -> bool:
        """Whether `device_types` has *device_type*, or is empty."""
        return not self.device_types or device_type in self.device_types

    @final
    def lacks(self, device_type: str) -> str | None:
        """What `unavailable` says, or what it raises: that too is something the machine lacks."""
        return _asked(self, "unavailable", device_type)

    @final
    def doubts(self, device_type: str) -> str | None:
        """What `caveat` says, or what it raises."""
        return _asked(self, "caveat", device_type)

    @final
    def refuses(self, adapter: Adapter) -> str | None:
        """What `unsupported` says, or what it raises."""
        return _asked(self, "unsupported", adapter)

    @final
    def load(self) -> Compute:
        """Import and return `function`."""
        function: Compute = resolve(self.function)
        return function

    @final
    def load_reference(self) -> Compute:
        """Import and return `reference`."""
        reference: Compute = resolve(self.reference)
        return reference

    @final
    @hookspec
    @hookimpl
    def propose(self, site: Site) -> Answer | None:
        """Ask `match`, and let nothing it raises reach the other kernels. Not to be overridden."""
        try:
            said = self.match(site)
            if said is None:
                return None
            proposals = () if isinstance(said, Rejection) else tuple(said)
            if wrong := [fault for answer in proposals or (said,) for fault in _faults_of_answer(answer)]:
                raise TypeError("; ".join(wrong))
            if isinstance(said, Rejection):
                return Answer(self.kernel_id, rejection=said)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - third-party code may raise anything, or exit
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__} while matching: {error} ({where.filename}:{where.lineno})"
            return Answer(self.kernel_id, rejection=Rejection(reason, kind="error"))
        return Answer(self.kernel_id, proposals) if proposals else None


def _asked(kernel: BaseKernel, question: str, subject: Any) -> str | None:
    """What a method of *kernel* says of *subject*, or what it raises."""
    try:
        said: str | None = getattr(kernel, question)(subject)
        return said
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's check may raise anything, or exit
        return f"{type(error).__name__}: {error} (raised by its {question}())"


def _faults_of_answer(answer: Any) -> list[str]:
    """Everything that keeps one of the answers of `match` from being used."""
    if isinstance(answer, Rejection):
        return (
            [] if isinstance(answer.reason, str) else [f"a Rejection's reason must be a string, not {answer.reason!r}"]
        )
    if isinstance(answer, Proposal):
        return _faults_of_proposal(answer)
    # An empty answer is None in other words.
    empty = isinstance(answer, Iterable) and not isinstance(answer, str)
    return [] if empty else [f"match() must give Proposals, a Rejection or None; it gave {answer!r}"]


def _faults_of_proposal(answer: Proposal) -> list[str]:
    target, found = answer.target, []
    if not (isinstance(target, Target) and isinstance(target.method, str) and isinstance(target.function, str | None)):
        found.append(f"target must be a Target of names, not {target!r}")
    if not answer.adapters or not all(isinstance(a, Adapter) and hasattr(a, "variant") for a in answer.adapters):
        found.append(f"adapters must be Adapters with a variant, at least one, not {answer.adapters!r}")
    if not answer.mixes:
        found.append("mixes must be at least one")
    for name, what in (("covers", "paths"), ("impossible", "conditions"), ("dtypes_of", "names")):
        given = getattr(answer, name)
        if isinstance(given, str) or not all(isinstance(each, str) for each in given):
            found.append(f"{name} must be {what}, not {given!r}")
    if not callable(answer.example):
        found.append(f"example must be callable, not {answer.example!r}")
    found += [
        f"{name} must be a number, not {getattr(answer, name)!r}"
        for name in ("roundings", "working_roundings")
        if not isinstance(getattr(answer, name), int | float)
    ]
    if not isinstance(answer.exact, bool):
        found.append(f"exact must be True or False, not {answer.exact!r}")
    try:
        hash((tuple(answer.adapters), tuple(answer.mixes)))
    except TypeError as error:
        found.append(f"adapters and mixes must be hashable (adapters: frozen dataclasses): {error}")
    return found


def resolve(path: str) -> Any:
    """Import ``"package.module:name"``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def faults(kernel: Any) -> list[str]:
    """Everything that keeps *kernel*, a class that claims to be a `BaseKernel`, from being one."""
    if theirs := _of_llama_factory(kernel):
        remedy = (
            "derive it from fuseplug.BaseKernel, name kernel_id, op, device_types, function and reference, and instead "
            "of patching in apply() say in match() what is replaced (docs/write-a-kernel.md)"
        )
        return [f"it is written for LLaMA-Factory's interface, with {' and '.join(theirs)}: {remedy}"]
    if not inspect.isclass(kernel) or not issubclass(kernel, BaseKernel):
        return [f"{kernel!r} is not a subclass of fuseplug.BaseKernel"]
    found = [
        f"{name} must be a non-empty string, not {getattr(kernel, name, None)!r}"
        for name in ("kernel_id", "op", "function", "reference")
        if not (isinstance(getattr(kernel, name, None), str) and getattr(kernel, name))
    ]
    found += [
        f'{name} must be "package.module:function", not {said!r}'
        for name in ("function", "reference", "specimens")
        if isinstance(said := getattr(kernel, name, None), str)
        and said.count(":") != 1
        and said != BaseKernel.specimens
    ]
    if not isinstance(kernel.device_types, (tuple, list)) or not all(isinstance(d, str) for d in kernel.device_types):
        found.append(f"device_types must be a tuple of strings, not {kernel.device_types!r}")
    found += [
        f"{name} must be True or False, not {getattr(kernel, name)!r}"
        for name in ("differentiable", "compilable")
        if not isinstance(getattr(kernel, name), bool)
    ]
    if isinstance(kernel.priority, bool) or not isinstance(kernel.priority, int):
        found.append(f"priority must be an int, not {kernel.priority!r}")
    sizes = kernel.check_sizes
    if not isinstance(sizes, (tuple, list)) or not sizes or not all(type(size) is int and size > 0 for size in sizes):
        found.append(f"check_sizes must be positive numbers, at least one, not {sizes!r}")
    if kernel.propose is not BaseKernel.propose:
        found.append("propose() is final: write match() instead")
    if abstract := getattr(kernel, "__abstractmethods__", None):
        found.append(f"abstract: {', '.join(sorted(abstract))} not implemented")
    return found


def _of_llama_factory(kernel: Any) -> list[str]:
    """What of *kernel* is said or done as a kernel of LLaMA-Factory does it."""
    if not inspect.isclass(kernel):
        return []
    found = [name for name in ("_kernel_id", "_device") if hasattr(kernel, name)]
    if issubclass(kernel, BaseKernel) and inspect.getattr_static(kernel, "apply") is not vars(BaseKernel)["apply"]:
        found.append("an apply() of its own")
    return found
