"""The data that Fuseplug and a kernel exchange. It has no behaviour, and importing it does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fuseplug_verify import Adapter, Example

if TYPE_CHECKING:
    import torch

Mode = Literal["training", "inference"]

Compute = Callable[..., Any]
"""A function that computes an op. It is the reference, or a kernel with the reference's signature."""


@dataclass(frozen=True)
class Site:
    """One module of one model: what a kernel is asked about.

    Attributes:
        path: Where the module is, as in ``model.named_modules()``; ``""`` is the model itself. A kernel is asked once
            about all modules that are alike, and this is the path of the first.
        module: A stand-in for the module: its class, its attributes and its children, with parameters and buffers that
            have shape and dtype but no values (they are on ``meta``). Nothing done to it reaches the model.
        device_type: Where the module runs or will run: ``"cpu"``, ``"cuda"``, ``"npu"``, …
        mode: ``"training"`` if gradients are needed.
        paths: The paths of all modules that the question is about: of all that are alike, in the order of the model, or
            of the one module. A module that is in the model twice has two.
    """

    path: str
    module: torch.nn.Module
    device_type: str
    mode: Mode = "training"
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """What would be replaced at a site.

    Attributes:
        method: The method of the module that is replaced.
        function: If given, *method* itself stays. Instead, the function of this name which it looks up as a global of
            its Python module (``apply_rotary_pos_emb``) is replaced, for this one instance only.
        path: The module below the site whose method it is (``"lm_head"``); by default the site itself.
        around: For Fuseplug's own use: the kernel whose `Scope` goes around the method. The method itself stays.
    """

    method: str = "forward"
    function: str | None = None
    path: str = ""
    around: str = ""

    def __str__(self) -> str:
        method = f"{self.path}.{self.method}" if self.path else self.method
        return method if self.function is None else f"{method}:{self.function}"


@dataclass(frozen=True)
class Scope:
    """The calls of a method of the site during which the targets of a proposal are replaced.

    Outside such calls the originals compute. Fuseplug puts itself around the method. The method gets every call as it
    was made, and its result is returned as it is, so a scope cannot change what the method computes.

    Attributes:
        holds: ``holds(module, arguments)``: whether the targets are replaced during this call. *arguments* are those of
            the call by name, defaults and further keywords included.
        method: The method of the site.
    """

    holds: Callable[[torch.nn.Module, Mapping[str, Any]], bool]
    method: str = "forward"


@dataclass(frozen=True)
class Consent:
    """What a user gives up with a kernel, and the word with which they agree: ``apply_all(model, allow=[word])``.

    Attributes:
        word: A short name that other kernels may share: ``"lazy_logits"``.
        gives_up: What is no longer as it was, in one sentence. The report begins with it.
    """

    word: str
    gives_up: str


@dataclass(frozen=True)
class Proposal:
    """A kernel's offer for one target of a site, and for the targets that must be replaced together with it.

    Attributes:
        target: What the kernel would replace.
        adapters: The variants that it may be, most likely first. Running the module shows which one it is, if any.
        example: ``example(mix, size, generator)`` makes inputs and parameters for one of *mixes*; *size* is the number
            of elements that the main input should have, approximately and at least. Random numbers come from
            *generator*, so that the same call makes the same example.
        mixes: The combinations to check, opaque to Fuseplug: of dtypes, and of what else differs between calls, such as
            an optional argument. The first is that of the module as it is now.
        likely: Those of *mixes*, besides the first, in which the kernel itself is run. Calls in any other mix go to the
            original. By default all in which the module's own tensors have the same dtypes as in the first. Name fewer
            where each costs a compilation and some are rare, or more: a function has no tensors of its own.
        roundings: How many roundings to the output's dtype a right implementation may accumulate.
        working_roundings: How many roundings in float32, in which it computes, it may accumulate before that. These two
            are the constants *c* and *w* of the tolerance (``docs/tolerances.md``).
        covers: Paths below the site whose modules are no longer called once the target is replaced.
        exact: Whether the original must equal the reference bit for bit. Say no if the original is not reproducible to
            the bit, such as a grouped matmul that sums in an order of its own. It must then be within the same
            tolerance of the reference in float64, values and gradients, in every mix. Magnitudes are then those of
            whole tensors, not of rows. Float32 is the sharpest mix, so it must be among them.
        impossible: Conditions, in the words of the original's code (``"token_idx.numel() == 0"``), for which every
            input gives the same answer as all examples, unless the original raises. If a branch depends on shapes or
            values, goes one way in all examples and is not named here, the original is left alone.
        beside: Proposals for further targets. Each is verified on its own. All are applied, or none.
        scope: The calls during which the targets are replaced; ``None``: always.
        lazy: The class that stands for the result until something needs its values, a subclass of tensor: its method
            ``computed()`` gives the result, which Fuseplug checks to be the original's bit for bit. If it has
            ``counted_by(told)``, it calls ``told.real(why)`` when something needed the values, for the report.
        consent: What the user must agree to first.
        work: On how many elements the op works for each of the main input: for a gated MLP its inner width over its
            outer one. `BaseKernel.gains_from` counts these.
    """

    target: Target
    adapters: Sequence[Adapter]
    example: Callable[[Any, int, torch.Generator], Example]
    mixes: Sequence[Any]
    roundings: float = 4.0
    working_roundings: float = 16.0
    covers: Sequence[str] = ()
    exact: bool = True
    likely: Sequence[Any] | None = None
    impossible: Sequence[str] = ()
    beside: Sequence[Proposal] = ()
    scope: Scope | None = None
    lazy: type[Any] | None = None
    consent: Consent | None = None
    work: float = 1.0

    @property
    def all_targets(self) -> tuple[Proposal, ...]:
        """This, and those beside it."""
        return (self, *self.beside)


@dataclass(frozen=True)
class Use:
    """A kind of call for which a kernel may be faster than the original, or not.

    Attributes:
        adapter: The variant of the op.
        device_type: Where it runs.
        dtype: That of the main input.
        gradients: Whether the main input requires gradients.
    """

    adapter: Adapter
    device_type: str
    dtype: torch.dtype
    gradients: bool


@dataclass(frozen=True)
class Rejection:
    """Why a site that has the kernel's op is left alone. For a site without it, a kernel answers ``None``.

    Attributes:
        reason: What prevents it, and what to do about it, for a person to read.
        kind: Kernels give ``"unsupported"``. Fuseplug itself adds ``"unlike"`` (its behaviour matches no
            variant), ``"failed"`` (the kernel's numbers are wrong here), ``"error"`` (the kernel raised or broke the
            contract), ``"foreign"`` (somebody else's replacement is in place), ``"unavailable"`` (the machine lacks
            something the kernel needs), ``"consent"`` (the user has not agreed to what it gives up), ``"slower"``
            (it was measured, and gains in no call) and ``"rounding"`` (with ``rounding="exact"``, it is right, but its
            bits are not the original's).
    """

    reason: str
    kind: Literal[
        "unsupported", "unlike", "failed", "error", "foreign", "unavailable", "consent", "slower", "rounding"
    ] = "unsupported"


@dataclass(frozen=True)
class Answer:
    """What one kernel answered about one site."""

    kernel_id: str
    proposals: Sequence[Proposal] = ()
    rejection: Rejection | None = None
