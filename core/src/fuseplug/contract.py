"""The data that Fuseplug and a kernel exchange: classes without behaviour, in a module that does not import torch."""

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
    """One module of one model, about which a kernel is asked.

    Attributes:
        path: Where the module is, as in ``model.named_modules()``; ``""`` is the model itself. A kernel is asked once
            about all modules that are alike, and this is the path of the first one.
        module: A stand-in for the module: its class, its attributes and its children, with parameters and buffers that
            have shape and dtype but no values (they are on ``meta``). Changes to the stand-in do not reach the model.
        device_type: Where the module runs or will run: ``"cpu"``, ``"cuda"``, ``"npu"``, …
        mode: ``"training"`` if gradients are needed.
        paths: The paths of all modules that the question is about, in the order of the model: of all modules that are
            alike, or of one module. A module that is in the model twice has two paths.
    """

    path: str
    module: torch.nn.Module
    device_type: str
    mode: Mode = "training"
    paths: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """The part of a site that would be replaced.

    Attributes:
        method: The method of the module that is replaced.
        function: If given, *method* itself stays. Instead, the function of this name, which *method* looks up as a
            global of its Python module (``apply_rotary_pos_emb``), is replaced for this one instance only.
        path: The path, below the site, of the module that has the method (``"lm_head"``); by default the site itself.
        around: For Fuseplug's own use: the id of the kernel whose `Scope` goes around the method. The method itself
            stays.
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

    Outside these calls, the originals compute. Fuseplug wraps the method, passes every call on unchanged, and returns
    its result unchanged, so a scope cannot change what the method computes.

    Attributes:
        holds: ``holds(module, arguments)`` says whether the targets are replaced during this call. *arguments* are the
            arguments of the call by name, including defaults and further keywords.
        method: The method of the site.
    """

    holds: Callable[[torch.nn.Module, Mapping[str, Any]], bool]
    method: str = "forward"


@dataclass(frozen=True)
class Consent:
    """What a user gives up with a kernel, and the word with which they agree: ``apply_all(model, allow=[word])``.

    Attributes:
        word: A short name that other kernels may share: ``"lazy_logits"``.
        gives_up: What the user gives up, in one sentence. The report begins with this sentence.
    """

    word: str
    gives_up: str


@dataclass(frozen=True)
class Proposal:
    """A kernel's offer for one target of a site, and for the targets that must be replaced together with it.

    Attributes:
        target: What the kernel would replace.
        adapters: Adapters of the variants that the target may be, most likely first. Running a twin of the module shows
            which variant it is, if any.
        example: ``example(mix, size, generator)`` makes inputs and parameters for one of *mixes*. The main input should
            have about *size* elements, and no fewer. Random numbers come from *generator*, so that the same call makes
            the same example.
        mixes: The combinations to check, of dtypes and of everything else that differs between calls, such as an
            optional argument. They are opaque to Fuseplug. The first is that of the module as it is now.
        likely: The *mixes*, besides the first, in which the kernel itself is run. A call goes to the original if its
            dtypes together, or the kinds of its arguments together, are those of none of these mixes. By default, these
            are all mixes in which the module's own tensors have the same dtypes as in the first. Name more, or fewer if
            each costs a compilation and some are rare. A function has no tensors of its own, so its default is all
            mixes.
        roundings: How many roundings to the output's dtype a right implementation may accumulate.
        working_roundings: How many roundings in float32, in which it computes, it may accumulate before that. These two
            are the constants *c* and *w* of the tolerance (``docs/tolerances.md``).
        covers: The paths, below the site, of modules that are no longer called once the target is replaced.
        exact: Whether the original must equal the reference bit for bit. Give ``False`` if the original is not
            reproducible bit for bit, such as a grouped matmul, which does not add in a fixed order. Its values and
            gradients must then be within the same tolerance of the reference in float64, in every mix. The magnitudes
            in that tolerance are those of whole tensors, not of rows. Float32 is the sharpest mix, so *mixes* must
            contain it.
        impossible: Conditions, in the words of the original's code (``"token_idx.numel() == 0"``), whose answer is the
            same for every input as for all examples, unless the original raises. If a branch depends on shapes or
            values, goes one way in all examples and is not named here, the original is left alone.
        beside: Proposals for further targets. Each is verified on its own. All are applied, or none.
        scope: The calls during which the targets are replaced; ``None`` for all calls.
        lazy: The class of lazy results, a subclass of `torch.Tensor`. Its method ``computed()`` gives the real result,
            which Fuseplug checks to be the original's bit for bit. If the class has a method ``counted_by(told)``, a
            lazy result calls ``told.real(why)`` when something needs its values, so that Fuseplug can count this.
        consent: What the user must agree to first.
        work: The number of elements on which the op works for each element of the main input: for a gated MLP, its
            inner width divided by its outer width. `BaseKernel.gains_from` counts elements times *work*.
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
        """This proposal and those beside it."""
        return (self, *self.beside)


@dataclass(frozen=True)
class Use:
    """A kind of call, for which a kernel may or may not be faster than the original.

    Attributes:
        adapter: The variant of the op.
        device_type: Where it runs.
        dtype: The dtype of the main input.
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
        reason: What prevents the replacement, and what to do about it, for a person to read.
        kind: Kernels give ``"unsupported"``. Fuseplug itself adds ``"unlike"`` (the original's behaviour matches no
            variant), ``"failed"`` (the kernel's numbers are wrong here), ``"error"`` (the kernel raised or broke the
            contract), ``"foreign"`` (somebody else's replacement is in place), ``"unavailable"`` (the machine lacks
            something that the kernel needs), ``"consent"`` (the user has not agreed to what the kernel gives up),
            ``"slower"`` (the kernel was measured, and gains in no call) and ``"rounding"`` (with ``rounding="exact"``,
            the kernel is right, but its bits are not the original's).
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
