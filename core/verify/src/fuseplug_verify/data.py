"""What is exchanged with whoever has something verified. Importing it imports no torch."""

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
    """Calls a kernel for one variant of an op in the way in which a module calls its own code.

    Subclass it as a **frozen dataclass**: adapters are compared by value, so that modules which need the same adapter
    share one function (and ``torch.compile`` compiles it once).
    """

    variant: str
    """The name of the exact semantics, such as ``"llama"`` or ``"gemma"``."""

    @property
    def reads(self) -> tuple[str, ...]:
        """What the bound function reads from the module at each call, by names with dots (``"config.dropout"``).

        ``"*"`` is each item of a list of modules: ``"experts.*.up_proj.weight"``.
        Name parameters, buffers, numbers and flags. Do not name the children that it calls: Fuseplug finds them.
        What is named here may change after the kernel was applied, because the kernel sees the change. Everything else
        that the original reads is compared at each call with its former value, and the original runs if it differs. So
        an adapter that names too little is right, but a little slower.
        """
        return ()

    @abc.abstractmethod
    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return a drop-in replacement for the target that lets *compute* do the work.

        For a method it is a plain function whose first parameter is the module. Read parameters and attributes from the
        module at each call, never from the site, so that later changes of the module are seen. For a function target it
        is a function with the signature of the function that it replaces.

        Fuseplug calls the result as the examples were called. If the caller wrote the call in another way, Fuseplug
        puts the arguments in place first. It calls the original instead whenever something differs from what was
        verified: device type, dtype, arguments, or anything that the original depends on and `reads` does not name.
        Return ``NotImplemented`` for any other call that the original is to compute. A `ValueError` of the function or
        of the kernel means that too, as when a weight has got another shape: outside programs that are compiled.
        """

    def standing_for(self, original: Callable[..., Any], compute: Compute) -> Callable[..., Any]:
        """The function that `bind` returns, with *original* called when that returns ``NotImplemented``."""
        bound = self.bind(compute)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = bound(*args, **kwargs)
            return original(*args, **kwargs) if result is NotImplemented else result

        return call


@dataclass(frozen=True)
class Example:
    """Small inputs on the CPU that distinguish the variants that a site may have.

    Attributes:
        args: Positional arguments of the target, without the module. The first tensor is the main input. Tensors should
            lie in memory as in a model, because a kernel may be compiled for a layout.
        parameters: For a method target: fresh values for the module's own parameters and buffers, by name.
        children: For a method target: modules that replace the module's own children, by name.
        attributes: For a method target: other values for the module's attributes. Sizes, so that a large module can be
            tried small; numbers, so that a number which happens to be 1 or infinite is seen to be used.
        kwargs: The arguments that the bound function of the adapter takes by keyword. Callers may write the call in any
            way.
        after: What the model goes on to do with the result: ``after(result)``. What that returns is compared instead of
            the result, with its gradients. So a small module stands for a large model. It must work for results of any
            length, dtype and device, and give the same each time.
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
    """Calls a function as the original itself is called: for a replacement that has the original's parameters."""

    variant = "the original"

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return *compute* itself."""
        return compute


@dataclass(frozen=True)
class Candidate:
    """What a module or a function may compute: the variants of one op, and the examples that tell them apart.

    Attributes:
        example: ``example(mix, size, generator)`` makes inputs and parameters for one of *mixes*; *size* is the number
            of elements that the main input should have, approximately and at least. Random numbers come from
            *generator*, so that the same call makes the same example.
        mixes: The combinations to check, opaque to this library: of dtypes, and of what else differs between calls,
            such as an optional argument. The first is that of the module as it is now.
        adapters: The variants that it may be, most likely first. By default the one that calls a function as the
            original is called.
        reference: The op in plain PyTorch, the definition of right. It computes in ``promote(x.dtype, float32)``, so
            that float64 inputs give the truth. By default the original itself, run in float64.
        likely: Those of *mixes*, besides the first, in which the kernel itself is run. By default all in which the
            module's own tensors have the same dtypes as in the first.
        roundings: How many roundings to the output's dtype a right implementation may accumulate.
        working_roundings: How many roundings in float32, in which it computes, it may accumulate before that.
        exact: Whether the original must equal the reference bit for bit. If not, it must be within the tolerance of
            the reference in float64, values and gradients, in every mix.
        impossible: Conditions, in the words of the original's code, for which every input gives the same answer as
            all examples, unless the original raises.
        lazy: The class of results that stand for tensors and have ``computed()``, which gives the tensor.
        check_sizes: Numbers of elements at which a kernel is run on its device. Name more than one where it takes
            different paths for small and large inputs.
        identity: What the kernel is, in plain data that is the same in every process, to keep the result of its check
            between them; empty: it is not kept.
        packages: The top packages whose code takes part, besides those of the adapters.
    """

    SMALL: ClassVar[int] = 64
    """Elements wanted in the examples that tell variants apart, which can do with as few."""

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
        """The example for one mix and size: always the same one, and another for each *number*.

        Raises:
            TypeError: If what `example` gives is not one.
        """
        import torch

        example = self.example(mix, size, torch.Generator().manual_seed(size + number))
        if not (isinstance(example, Example) and example.args and isinstance(example.args[0], torch.Tensor)):
            raise TypeError(f"example() must give an Example whose first argument is a tensor; it gave {example!r:.80}")
        return example


@dataclass(frozen=True)
class Refusal:
    """Why something is not what it was said to be, or cannot be found out.

    Attributes:
        reason: What differs, where, and by how much, for a person to read.
        kind: ``"unlike"``: the original computes none of the variants, or cannot be read or run. ``"failed"``: the
            kernel's numbers are wrong. ``"rounding"``: they are right, but not the original's bit for bit.
            ``"error"``: somebody's code raised. ``"unsupported"``: it is of a sort that cannot be looked at.
    """

    reason: str
    kind: Literal["unlike", "failed", "rounding", "error", "unsupported"] = "unlike"


@dataclass(frozen=True)
class Semantics:
    """What a subject was found to compute.

    Attributes:
        candidate: What it was said to be.
        adapter: The adapter of its variant.
        accepts: The calls for which that was found.
        draws: Whether it may draw random numbers.
        evidence: A hash of what the original did on the examples and of its code; ``""`` if there is none.
    """

    candidate: Candidate
    adapter: Adapter
    accepts: VerifiedCalls
    draws: bool = True
    evidence: str = ""


@dataclass(frozen=True)
class Conditions:
    """The conditions in which a kernel computes on its device what the original does.

    Attributes:
        dtypes: As `VerifiedCalls.dtypes`: those in which it was run.
        contiguous: Whether it computes what the original does only if the input is contiguous.
        no_autocast: Whether it computes what the original does only without autocast.
        ranks: The numbers of dimensions of the main input with which it was right; empty if all were.
        before: Whether that was found in another process, and kept.
    """

    dtypes: tuple[Dtypes, ...]
    contiguous: bool = False
    no_autocast: bool = False
    ranks: frozenset[int] = frozenset()
    before: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for another process."""
        return {
            "dtypes": [[dtype and str(dtype).removeprefix("torch.") for dtype in row] for row in self.dtypes],
            "contiguous": self.contiguous,
            "no_autocast": self.no_autocast,
            "ranks": sorted(self.ranks),
        }

    @classmethod
    def kept(cls, answer: Any) -> Conditions | None:
        """What `to_dict` made plain data of; ``None`` if that is something else."""
        import torch

        try:
            rows = [tuple(name and getattr(torch, name) for name in row) for row in answer["dtypes"]]
            flags = (bool(answer["contiguous"]), bool(answer["no_autocast"]))
            return cls(tuple(rows), *flags, frozenset(map(int, answer["ranks"])), before=True)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None
