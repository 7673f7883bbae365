"""The contract of a kernel: one class to subclass, which is also the pluggy hookspec."""

from __future__ import annotations

import abc
import importlib
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, final

import pluggy

from fuseplug_verify import Adapter

from .contract import Answer, Compute, Consent, Proposal, Rejection, Scope, Site, Target, Use

PROJECT = "fuseplug"
ENTRY_POINT_GROUP = "fuseplug.kernels"
NEWEST_API = 1
"""The newest version of the contract. `BaseKernel.api` stays 1 when a second comes: who names none has the first."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class BaseKernel(abc.ABC):  # so that the base of several kernels may leave a method to them
    """One fused implementation of one op. Subclass it in a module that imports no torch.

    A kernel is declared as data and answers one question, `match`. It never touches a model: Fuseplug checks it,
    applies it, takes it off and reports it, the same way for everybody.

    Attributes:
        api: The version of this contract that the kernel was written for. It keeps working with every later release
            of Fuseplug that has the same (``docs/compatibility.md``).
        kernel_id: The kernel's name everywhere; equal to the name of its entry point.
        op: What it computes, in the field's words: ``"rmsnorm"``, ``"swiglu"``, ``"rope"``, ``"moe"`` or your own.
        function: ``"package.module:function"`` that computes it; imported when the kernel is chosen, not before.
        reference: ``"package.module:function"`` in plain PyTorch with the same signature: the definition of right. It
            must compute in ``promote(x.dtype, float32)``, so that float64 inputs give the truth.
        recogniser: ``"package.module:function"``, which `match` calls with the site; imported when a model is planned,
            not before. A kernel that writes `match` itself needs none.
        specimens: ``"package.module:function"`` that returns small modules which the kernel fuses, at least one for
            each variant that it claims: what `fuseplug_testing` checks it on. If the kernel has a scope, each has a
            property ``dummy_inputs``: the arguments of a call within it, by name. Optional, and inherited.
        device_types: Where it runs; empty for every device.
        differentiable: Whether gradients flow through it. If not, it is used only for ``mode="inference"``.
        when_traced: What computes a call that ``torch.compile``, ``torch.export`` or ``torch.jit.trace`` traces: the
            ``"kernel"``, or the ``"original"``, if the compiler fuses that as well, or cannot trace the kernel in one
            graph.
        priority: Among kernels equally specific to a device the higher one is preferred.
        rehearsal: For each device type where the first call compiles programs that can be built side by side:
            ``"package.module:function"``. The function takes nothing and returns a context manager, within which a plan
            is made. That gives ``None`` if nothing is to be gained here, or a function that returns another context
            manager. Inside that one the kernel is called first: a program that is not there yet begins to be built, and
            the call does not wait for it. What the call returns is not used.
        check_sizes: Numbers of elements at which the kernel is checked on its device. Name more than one where it takes
            different paths for small and large inputs.
    """

    api: ClassVar[int] = 1
    kernel_id: ClassVar[str]
    op: ClassVar[str]
    function: ClassVar[str]
    reference: ClassVar[str]
    recogniser: ClassVar[str] = ""
    specimens: ClassVar[str] = ""
    device_types: ClassVar[tuple[str, ...]] = ()
    differentiable: ClassVar[bool] = True
    when_traced: ClassVar[Literal["kernel", "original"]] = "kernel"
    priority: ClassVar[int] = 0
    rehearsal: ClassVar[Mapping[str, str]] = MappingProxyType({})
    check_sizes: ClassVar[tuple[int, ...]] = (512, 1 << 17)

    def match(self, site: Site) -> Iterable[Proposal] | Rejection | None:
        """Say what this kernel would replace at *site*: what `recogniser` says.

        Returns:
            Proposals, of which the first that fits a target is used; a `Rejection` if the site has this kernel's op but
            cannot be served;
            ``None`` if the module does not have the kernel's op.
        """
        recognise: Callable[[Site], Iterable[Proposal] | Rejection | None] = resolve(self.recogniser)
        return recognise(site)

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

    def gains_from(self, use: Use) -> int:
        """Return from how many elements on the kernel is faster than the original; 0 if it always is.

        Measure it. A call with fewer is computed by the original, bit for bit as without Fuseplug. Asked when the
        kernel is planned, not at each call.

        Returns:
            Elements of the main input, times `Proposal.work`.
        """
        del use
        return 0

    def gains_until(self, use: Use) -> int:
        """Return up to how many elements the kernel is faster as well, below `gains_from`; 0 if it never is there.

        For a kernel that computes a few rows in another way. Counted, measured and asked like `gains_from`.
        """
        del use
        return 0

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
            answer = self.match(site)
            if answer is None:
                return None
            proposals = () if isinstance(answer, Rejection) else tuple(answer)
            if wrong := [fault for item in proposals or (answer,) for fault in _faults_of_answer(item)]:
                raise TypeError("; ".join(wrong))
            if isinstance(answer, Rejection):
                return Answer(self.kernel_id, rejection=answer)
        except KeyboardInterrupt as error:
            # Whether somebody pressed Ctrl-C or the kernel raised it cannot be told.
            raise KeyboardInterrupt(
                f"interrupted while kernel {self.kernel_id} of {type(self).__module__} was asked about "
                f"{site.path or 'the model'}; exclude={self.kernel_id!r} leaves it out"
            ) from error
        except BaseException as error:  # noqa: BLE001 - third-party code may raise anything, or exit
            where = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{type(error).__name__} while matching: {error} ({where.filename}:{where.lineno})"
            return Answer(self.kernel_id, rejection=Rejection(reason, kind="error"))
        return Answer(self.kernel_id, proposals) if proposals else None


def _asked(kernel: BaseKernel, question: str, subject: Any) -> str | None:
    """What a method of *kernel* says of *subject*, or what it raises."""
    try:
        reply: str | None = getattr(kernel, question)(subject)
        return reply
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - a third party's check may raise anything, or exit
        return f"{type(error).__name__}: {error} (raised by its {question}())"


def resolve(path: str) -> Any:
    """Import ``"package.module:name"``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


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
    target, faults = answer.target, []
    if not (isinstance(target, Target) and isinstance(target.method, str) and isinstance(target.function, str | None)):
        faults.append(f"target must be a Target of names, not {target!r}")
    if not answer.adapters or not all(isinstance(a, Adapter) and hasattr(a, "variant") for a in answer.adapters):
        faults.append(f"adapters must be Adapters with a variant, at least one, not {answer.adapters!r}")
    if not answer.mixes:
        faults.append("mixes must be at least one")
    for name, what in (("covers", "paths"), ("impossible", "conditions")):
        value = getattr(answer, name)
        if isinstance(value, str) or not all(isinstance(item, str) for item in value):
            faults.append(f"{name} must be {what}, not {value!r}")
    if not callable(answer.example):
        faults.append(f"example must be callable, not {answer.example!r}")
    faults += [
        f"{name} must be a number, not {getattr(answer, name)!r}"
        for name in ("roundings", "working_roundings")
        if not isinstance(getattr(answer, name), int | float)
    ]
    if not isinstance(answer.work, int | float) or not answer.work > 0:
        faults.append(f"work must be a positive number, not {answer.work!r}")
    faults += _faults_of_company(answer)
    if not isinstance(answer.exact, bool):
        faults.append(f"exact must be True or False, not {answer.exact!r}")
    try:
        hash((tuple(answer.adapters), tuple(answer.mixes)))
    except TypeError as error:
        faults.append(f"adapters and mixes must be hashable (adapters: frozen dataclasses): {error}")
    return faults


def _faults_of_company(answer: Proposal) -> list[str]:
    """What is wrong with what goes with the target: other targets, a scope, a consent."""
    faults = []
    for name, kind in (("scope", Scope), ("consent", Consent), ("lazy", type)):
        value = getattr(answer, name)
        if value is not None and not isinstance(value, kind):
            faults.append(f"{name} must be a {kind.__name__} or None, not {value!r}")
    for other in answer.beside:
        if not isinstance(other, Proposal) or other.beside or other.scope or other.consent:
            faults.append(f"beside must be Proposals without beside, scope and consent of their own, not {other!r:.80}")
        else:
            faults += _faults_of_proposal(other)
    return faults
