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
"""The newest version of the contract. A newer one does not change `BaseKernel.api`: the default version stays 1."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class BaseKernel(abc.ABC):  # a common base of several kernels may declare abstract methods
    """One fused implementation of one op. Subclass it in a module that does not import torch.

    A kernel declares data and answers one question, `match`. It never touches a model: Fuseplug checks, applies, undoes
    and reports all kernels in the same way.

    Attributes:
        api: The version of this contract that the kernel was written for. The kernel keeps working with every later
            release of Fuseplug that supports this version (``docs/compatibility.md``).
        kernel_id: The kernel's name everywhere; equal to the name of its entry point.
        op: What the kernel computes, in the field's words: ``"rmsnorm"``, ``"swiglu"``, ``"rope"``, ``"moe"`` or your
            own.
        function: ``"package.module:function"`` that computes the op. Imported only when the kernel is chosen.
        reference: ``"package.module:function"`` in plain PyTorch with the same signature. It defines the right result.
            It must compute in ``promote(x.dtype, float32)``, so that float64 inputs give the true result.
        recogniser: ``"package.module:function"``, which `match` calls with the site. Imported only when a model is
            planned. A kernel that overrides `match` needs none.
        specimens: ``"package.module:function"`` that returns small modules which the kernel fuses, at least one for
            each variant that it claims. `fuseplug_testing` checks the kernel on them. If the kernel has a scope, each
            module has a property ``dummy_inputs``: the arguments, by name, of a call within the scope. Optional, and
            inherited.
        device_types: The types of device on which the kernel runs; empty for every device.
        differentiable: Whether gradients flow through the kernel. If not, it is used only for ``mode="inference"``.
        when_traced: What computes a call that ``torch.compile``, ``torch.export`` or ``torch.jit.trace`` traces, or
            whose operations a dispatch mode sees, such as selective checkpointing: the ``"kernel"`` or the
            ``"original"``. Choose the original if the compiler fuses it, too, or cannot trace the kernel in one graph.
            Under the transforms of `torch.func` and in forward mode, the original always computes.
        priority: Of kernels that are equally specific to a device, the one with the highest priority is preferred.
        rehearsal: ``"package.module:function"`` for each device type on which the first call compiles programs that can
            be built in parallel. The function takes no arguments and returns a context manager, within which Fuseplug
            makes the plan. Entering it gives ``None`` if a rehearsal would save nothing here, or else a function that
            returns a second context manager. Within that, Fuseplug calls the kernel before it checks it: the call
            starts to build each missing program and does not wait for it, and its result is not used.
        check_sizes: Numbers of elements at which the kernel is checked on its device. Name more than one if the kernel
            takes different paths for small and large inputs.
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
        """Return what this kernel would replace at *site*. By default, `recogniser` answers.

        Returns:
            Proposals, of which Fuseplug uses the first that fits a target;
            a `Rejection` if the site has this kernel's op, but the kernel cannot serve it;
            ``None`` if the site does not have this kernel's op.
        """
        recognise: Callable[[Site], Iterable[Proposal] | Rejection | None] = resolve(self.recogniser)
        return recognise(site)

    def unavailable(self, device_type: str) -> str | None:
        """Return what this machine lacks to run the kernel on *device_type*, with the remedy; ``None`` if nothing."""
        del device_type
        return None

    def caveat(self, device_type: str) -> str | None:
        """Return why the kernel may be wrong on *device_type* here; ``None`` if there is no reason for doubt.

        ``fuseplug doctor`` shows the answer. A doubtful kernel is still used if it passes the check on its device.
        """
        del device_type
        return None

    def unsupported(self, adapter: Adapter) -> str | None:
        """Return why this kernel does not compute the variant of *adapter*; ``None`` if it does.

        Fuseplug asks after it has run the site's code and found its variant. The base class of an op may recognise more
        variants than one implementation serves.
        """
        del adapter
        return None

    def gains_from(self, use: Use) -> int:
        """Return the number of elements from which on the kernel is faster than the original; 0 if it always is.

        Measure this number. The original computes calls with fewer elements, bit for bit as without Fuseplug. Fuseplug
        asks when it plans, not at each call.

        Returns:
            Elements of the main input, times `Proposal.work`.
        """
        del use
        return 0

    def gains_until(self, use: Use) -> int:
        """Return the number of elements, below `gains_from`, up to which the kernel is faster, too; 0 if it never is.

        This is for a kernel that computes a few rows in another way. The number is counted, measured and asked for like
        that of `gains_from`.
        """
        del use
        return 0

    @final
    def runs_on(self, device_type: str) -> bool:
        """Return whether `device_types` contains *device_type* or is empty."""
        return not self.device_types or device_type in self.device_types

    @final
    def lacks(self, device_type: str) -> str | None:
        """Return the answer of `unavailable`, or the error that it raises: then, too, the machine lacks something."""
        return _asked(self, "unavailable", device_type)

    @final
    def doubts(self, device_type: str) -> str | None:
        """Return the answer of `caveat`, or the error that it raises."""
        return _asked(self, "caveat", device_type)

    @final
    def refuses(self, adapter: Adapter) -> str | None:
        """Return the answer of `unsupported`, or the error that it raises."""
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
        """Ask `match`, and keep everything that it raises from the other kernels. Do not override this method."""
        try:
            answer = self.match(site)
            if answer is None:
                return None
            if isinstance(answer, Rejection):
                if not isinstance(answer.reason, str):
                    raise TypeError(f"a Rejection's reason must be a string, not {answer.reason!r}")
                return Answer(self.kernel_id, rejection=answer)
            proposals = tuple(answer) if isinstance(answer, Iterable) and not isinstance(answer, str) else (answer,)
            if isinstance(answer, Proposal) or not all(isinstance(item, Proposal) for item in proposals):
                raise TypeError(f"match() must give a list of Proposals, a Rejection or None; it gave {answer!r:.80}")
            if faults := [fault for proposal in proposals for fault in _faults_of_proposal(proposal)]:
                raise TypeError("; ".join(faults))
        except KeyboardInterrupt as error:
            # Ctrl-C cannot be told from a kernel that raises KeyboardInterrupt.
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
    """Return what the method *question* of *kernel* answers about *subject*, or the error that it raises."""
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
    """Return the faults of what accompanies the target: a scope, a consent, a lazy class, other targets."""
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
