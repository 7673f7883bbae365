"""The data that this library exchanges with its callers. Importing this module does not import torch."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import torch

    from .watch import Dtypes, VerifiedCalls

Compute = Callable[..., Any]
"""A function that computes an op. It is the reference, or a kernel with the reference's signature."""


class Adapter(abc.ABC):
    """Calls a kernel for one variant of an op in the way that a module calls its own code.

    Subclass it as a **frozen dataclass**: adapters are compared by value, so that modules which need the same adapter
    share one function (and ``torch.compile`` compiles it once).
    """

    variant: str
    """The name of the exact semantics, such as ``"llama"`` or ``"gemma"``."""

    @property
    def reads(self) -> tuple[str, ...]:
        """What the bound function reads from the module at each call, as dotted names (``"config.dropout"``).

        ``"*"`` stands for each item of a list of modules: ``"experts.*.up_proj.weight"``. Name parameters, buffers,
        numbers and flags. Do not name the children that the function calls: Fuseplug finds them. A value that is named
        here may change after the kernel was applied, because the kernel sees the change; a number must stay one. Every
        other number or flag that the original reads is compared at each call with its former value, and the original
        runs if it differs. So an adapter that leaves one out is right, but a little slower. If a tensor that is left
        out makes a difference, the site is left alone.
        """
        return ()

    @abc.abstractmethod
    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a drop-in replacement for the target that lets *compute* do the work.

        For a method, the replacement is a plain function whose first parameter is the module. It must read parameters
        and attributes from the module at each call, never from the site, so that it sees later changes of the module.
        For a function, the replacement has the signature of the function that it replaces.

        Fuseplug calls the replacement as the examples were called. If the caller wrote the call in another way,
        Fuseplug puts the arguments in place first. It calls the original instead whenever something differs from what
        was verified: device type, dtype, arguments, or anything that the original depends on and `reads` does not name.
        The replacement returns ``NotImplemented`` for any other call that the original is to compute. Outside compiled
        programs, a `ValueError` of the replacement or of the kernel means the same: a weight may have a new shape.
        """

    def standing_for(self, original: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
        """Return a function that calls what `bind` returns, and *original* if the result is ``NotImplemented``."""
        bound = self.bind(compute)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = bound(*args, **kwargs)
            return original(*args, **kwargs) if result is NotImplemented else result

        return call


@dataclass(frozen=True)
class Example:
    """Small inputs on the CPU that distinguish the variants that a site may have.

    Attributes:
        args: Positional arguments of the target, without the module. The main input is the first floating-point tensor,
            or the first tensor if none is. Tensors should have the memory layout that they have in a model, because a
            kernel may be compiled for a layout.
        parameters: For a method target: fresh values for the module's own parameters and buffers, by name.
        children: For a method target: modules that replace the module's own children, by name.
        attributes: For a method target: other values for the module's attributes. Give sizes, so that a large module
            can be tried small, and numbers, because the use of a number that happens to be 1 or infinite does not show.
        kwargs: The arguments that the bound function of the adapter takes by keyword. Callers may write the call in any
            way.
        after: What the model goes on to do with the result. The value of ``after(result)``, with its gradients, is
            compared instead of the result, so that a small module stands for a large model. The function must work for
            results of any length, dtype and device, and return the same each time.
    """

    args: Sequence[Any]
    parameters: Mapping[str, torch.Tensor] = field(default_factory=dict)
    children: Mapping[str, torch.nn.Module] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    after: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if below := [name for name in self.parameters if "." in name]:
            raise ValueError(f"parameters has {below[0]!r}, and takes the module's own only: give a child in children=")


@dataclass(frozen=True)
class AsCalled(Adapter):
    """Calls a replacement, which must have the original's parameters, just as the original is called."""

    variant = "the original"

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return *compute* itself."""
        return compute


@dataclass(frozen=True)
class Candidate:
    """What a module or a function may compute: the variants of one op, and the examples that tell them apart.

    Attributes:
        example: ``example(mix, size, generator)`` makes inputs and parameters for one of *mixes*. The main input should
            have about *size* elements, and not fewer. Random numbers come from *generator*, so that the same call makes
            the same example.
        mixes: The combinations to check: of dtypes, and of anything else that differs between calls, such as an
            optional argument. This library does not look into them. The first is that of the module as it is now.
        adapters: The variants that the original may be, most likely first. The default is the adapter that calls a
            function as the original is called.
        reference: The op in plain PyTorch, which defines the right result. It computes in ``promote(x.dtype,
            float32)``, so that float64 inputs give the truth. The default is the original itself, run in float64.
        likely: The *mixes*, besides the first, in which the kernel itself is run. The default is all mixes in which the
            module's own tensors have the same dtypes as in the first.
        roundings: How many roundings to the output's dtype a right implementation may accumulate.
        working_roundings: How many roundings to float32, in which it computes, it may accumulate before those.
        exact: Whether the original must equal the reference bit for bit. If not, its values and gradients must be
            within the tolerance of the reference in float64, in every mix.
        impossible: Conditions, as the original's code writes them, that have the same outcome for every input as for
            all examples, unless the original raises.
        lazy: The class of lazy results, which stand for tensors; their method ``computed()`` returns the tensor.
        check_sizes: Numbers of elements at which a kernel is run on its device. Name more than one if the kernel takes
            different paths for small and large inputs.
        identity: The kernel's identity, as plain data that is the same in every process. The result of the kernel's
            check is kept for other processes under it; if it is empty, the result is not kept.
        packages: The top-level packages whose code takes part, besides those of the adapters.
    """

    SMALL: ClassVar[int] = 64
    """How many elements the examples that tell variants apart should have: so few are enough."""

    example: Callable[[Any, int, torch.Generator], Example]
    mixes: Sequence[Any]
    adapters: Sequence[Adapter] = (AsCalled(),)
    reference: Compute | None = None
    likely: Sequence[Any] | None = None
    roundings: float = 4.0
    working_roundings: float = 16.0
    exact: bool = True
    impossible: Sequence[str] = ()
    lazy: type[Any] | None = None
    check_sizes: Sequence[int] = (512, 1 << 17)
    identity: tuple[Any, ...] = ()
    packages: Sequence[str] = ()

    def example_of(self, mix: Any, size: int = SMALL, number: int = 0) -> Example:
        """Return the example for one mix and size: always the same one, but another for each *number*.

        Raises:
            TypeError: If `example` does not return an `Example` whose first argument is a tensor.
        """
        import torch

        example = self.example(mix, size, torch.Generator().manual_seed(size + number))
        if not (isinstance(example, Example) and example.args and isinstance(example.args[0], torch.Tensor)):
            raise TypeError(f"example() must give an Example whose first argument is a tensor; it gave {example!r:.80}")
        return example


@dataclass(frozen=True)
class Refusal:
    """Why an original or a kernel is not what it was said to be, or why this cannot be found out.

    Attributes:
        reason: What differs, where, and by how much, for a person to read.
        kind: ``"unlike"``: the original computes none of the variants, or cannot be read or run. ``"failed"``: the
            kernel's numbers are wrong. ``"rounding"``: they are right, but not the original's bit for bit.
            ``"error"``: somebody's code raised. ``"unsupported"``: the subject is of a kind that cannot be verified.
    """

    reason: str
    kind: Literal["unlike", "failed", "rounding", "error", "unsupported"] = "unlike"


@dataclass(frozen=True)
class Semantics:
    """What a subject was found to compute.

    Attributes:
        candidate: What the subject was said to be.
        adapter: The adapter of its variant.
        accepts: The calls for which this was found.
        draws: Whether the original may draw random numbers.
        evidence: A hash of what the original did on the examples and of its code; ``""`` if there is none.
    """

    candidate: Candidate
    adapter: Adapter
    accepts: VerifiedCalls
    draws: bool = True
    evidence: str = ""


@dataclass(frozen=True)
class Conditions:
    """The conditions under which a kernel computes on its device what the original computes.

    Attributes:
        dtypes: The combinations of dtypes in which the kernel was run and was right, as in `VerifiedCalls.dtypes`.
        contiguous: Whether it is right for contiguous inputs only.
        no_autocast: Whether it is right without autocast only.
        ranks: The numbers of dimensions of the main input for which it was right; empty if it was right for all.
        before: Whether this was found in another process, and kept.
    """

    dtypes: tuple[Dtypes, ...]
    contiguous: bool = False
    no_autocast: bool = False
    ranks: frozenset[int] = frozenset()
    before: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the conditions as plain data, for another process."""
        return {
            "dtypes": [[dtype and str(dtype).removeprefix("torch.") for dtype in row] for row in self.dtypes],
            "contiguous": self.contiguous,
            "no_autocast": self.no_autocast,
            "ranks": sorted(self.ranks),
        }

    @classmethod
    def kept(cls, answer: Any) -> Conditions | None:
        """Return the conditions of which `to_dict` made *answer*; ``None`` if *answer* is something else."""
        import torch

        try:
            rows = [tuple(name and getattr(torch, name) for name in row) for row in answer["dtypes"]]
            flags = (bool(answer["contiguous"]), bool(answer["no_autocast"]))
            return cls(tuple(rows), *flags, frozenset(map(int, answer["ranks"])), before=True)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None
