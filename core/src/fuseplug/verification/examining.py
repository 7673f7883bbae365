"""What a module does on more than the examples: read its code, vary the calls, and say what is left to watch."""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..hookspecs import BaseKernel
from ..reading import Finding, Path, Reading, read
from ..words import Adapter, Example, Proposal, Rejection
from .branches import Branches
from .changing import Change, another_number, other_values
from .comparing import Tolerance, departure, difference
from .outcome import Outcome, Subject, run
from .varying import Variation, main_argument, variations
from .watch import Call, Extra, Watch, kind_of
from .watching import Dependence, dependence

Candidate = tuple[Adapter, Callable[..., Any]]
"""A variant that the original may be, and its adapter bound to the reference."""

Answer = Literal["same", "differs", "unanswered"]

_TRIED = frozenset({"shape", "value", "param", "grad"})
"""What a condition may depend on that only examples can settle. Everything else is watched, or varied by mixes."""

_AN_EXTRA_KEYWORD = {"num_items_in_batch": 3}
"""One that trainers hand to models."""


def read_original(subject: Subject) -> Reading | Rejection:
    """Read the code behind *subject*, before any of it is run; or say why it can be no kernel's.

    Running code that changes something would change it.
    """
    function, owner = subject.original, subject.module
    if isinstance(function, nn.Module):
        function, owner = type(function).forward, function
    if not isinstance(function, types.FunctionType):
        return Rejection(f"it is a {type(function).__name__}, whose code cannot be read", kind="unlike")
    return read(function, owner)


def forbidden(reading: Reading, replaced: Sequence[str]) -> Rejection | None:
    """What *reading* found that no fused code does.

    Args:
        reading: Of the original.
        replaced: The children that examples bring with them, whose own code is not run.
    """

    def own(findings: Sequence[Finding]) -> list[str]:
        return [finding.text for finding in findings if not (finding.inside and finding.inside[0] in replaced)]

    others = [context for context in reading.contexts if "other" in context.kinds]
    for findings, why in (
        (reading.effects, "it does more than compute, and a fused one would not"),
        (reading.unknown, "what it depends on cannot be read"),
        (others, "it computes in a context whose effect is not known"),
    ):
        if found := own(findings):
            more = f" (and {len(found) - 2} more)" if len(found) > 2 else ""
            return Rejection(f"{why}: {'; '.join(found[:2])}{more}", kind="unlike")
    return None


@dataclass(frozen=True)
class Semantics:
    """What a site was found to compute.

    Attributes:
        adapter: The adapter of its variant.
        calls: The ways of calling it for which that was found.
        main: Which argument is the main input, the module counted.
        typed: The tensors whose dtypes count: arguments by number, others by name below the module.
        dtypes: Their dtypes, in each combination for which it was found.
        watch: What must stay as it was.
        extra: What becomes of keyword arguments that the original has no parameters for.
        draws: Whether it may draw random numbers.
    """

    adapter: Adapter
    calls: tuple[Call, ...]
    main: int
    typed: tuple[int | str, ...]
    dtypes: tuple[tuple[torch.dtype, ...], ...]
    watch: Watch = Watch()
    extra: Extra = "original"
    draws: bool = True


@dataclass
class Examination:
    """One original, compared with the variants that it may be.

    Attributes:
        kernel: Whose reference it is.
        proposal: What was offered.
        subject: The original.
        reading: Of its code.
        candidates: The variants that no run has told from it.
        answered: The examples on which it ran.
        branches: The ways that its code took.
        why: What told the last variant from it.
    """

    kernel: BaseKernel
    proposal: Proposal
    subject: Subject
    reading: Reading
    candidates: Sequence[Candidate]
    answered: Sequence[Example]
    branches: Branches
    why: str = field(default="", init=False)

    def semantics(self) -> Semantics | Rejection:
        """Vary calls and state; say what the original is and what must be watched, or why it is left alone."""
        example, watch = self.answered[0], Watch()
        ranks = {len(each.args[main_argument(each)].shape) for each in self.answered}
        varied: set[int] = set()
        sizes, numbers = self.reading.sizes, self.reading.numbers
        clamps = bool(self.reading.clamps or any(_TRIED & each.kinds for each in self.reading.conditions))
        for variation in variations(example, sizes=sizes, numbers=numbers, clamps=clamps):
            answer = self._try(variation)
            if variation.kind == "rank":
                varied.add(variation.rank)
                ranks |= {variation.rank} if answer == "same" else set()
            elif answer == "same":
                continue
            elif variation.kind == "empty":
                watch = replace(watch, nonempty=True)
            elif variation.kind == "autocast":
                watch = replace(watch, no_autocast=True)
            elif answer == "differs":
                return self._differs(f"called with an input {variation.label}")
        while True:
            adapter = self.candidates[0][0]
            depends = dependence(self.reading, self.subject.module, adapter.reads, self._called())
            if (why := self._state(depends)) is not None:
                return why
            if self.candidates[0][0] is adapter:
                break
        if (why := self._untaken()) is not None:
            return why
        watch = replace(depends.watch, nonempty=watch.nonempty, no_autocast=watch.no_autocast)
        return self._described(adapter, watch, uniform=bool(varied) and varied <= ranks)

    def _try(self, variation: Variation) -> Answer:
        """Run the original and every candidate on *variation*; drop those that differ, unless all do."""
        gradients = self.proposal.exact or variation.kind != "magnitude"
        how: dict[str, Any] = {
            "gradients": gradients,
            "handing": variation.handing,
            "autocast": variation.autocast,
            "change": variation.change,
        }
        example = variation.example
        try:
            expected = run(self.subject, self.subject.original, example, **how, watching=self.branches)
        except Exception as error:  # noqa: BLE001 - where the original raises there is nothing to equal
            self.why = f"{type(error).__name__}: {error}"
            return "unanswered"
        same = []
        for adapter, function in self.candidates:
            try:
                found = run(self.subject, function, example, **how)
                why = self._compared(found, expected, example, function, how)
            except Exception as error:  # noqa: BLE001 - a variant that does not fit the module may raise anything
                why = f"its reference raises {type(error).__name__}: {error}"
            if why:
                self.why = f"{adapter.variant}: {why}"
            else:
                same.append((adapter, function))
        self.candidates = same or self.candidates
        return "same" if same else "differs"

    def _compared(
        self, found: Outcome, expected: Outcome, example: Example, function: Callable[..., Any], how: dict[str, Any]
    ) -> str:
        if self.proposal.exact:
            return difference(found, expected)
        truth = run(self.subject, function, example, **{**how, "autocast": False}, dtype=torch.float64)
        coarsest = torch.get_autocast_dtype("cpu") if how["autocast"] else None
        return departure(expected, found, truth, replace(Tolerance.of(self.proposal), coarsest=coarsest))

    def _state(self, depends: Dependence) -> Rejection | None:
        """What the original reads and the fused code does not follow, if it is nothing that can be watched."""
        if depends.unseen:
            return Rejection(f"it depends on what cannot be watched: {'; '.join(depends.unseen[:3])}", kind="unlike")
        for path in depends.numbers:
            if self._with("number", path, another_number(path)) == "differs":
                return self._differs(f"when its {'.'.join(path)} is another number")
        for path in depends.tensors:
            if self._with("tensor", path, other_values(path)) != "same":
                return Rejection(f"it also reads {'.'.join(path)}, a tensor that the kernel does not", kind="unlike")
        return None

    def _with(self, kind: Literal["number", "tensor"], path: Path, change: Change) -> Answer:
        return self._try(Variation(kind, ".".join(path), self.answered[0], change=change))

    def _untaken(self) -> Rejection | None:
        if not self.reading.conditions:
            return None
        called = self._called()
        for condition in self.reading.conditions:
            if condition.code is None or condition.span is None or not _TRIED & condition.kinds:
                continue
            if any(condition.inside[:count] in called for count in range(1, len(condition.inside) + 1)):
                continue
            if self.branches.one_sided(condition.code.co_filename, condition.span):
                return Rejection(
                    f"it has a branch that no example takes both ways, so what it does there is not known: "
                    f"{condition.text}",
                    kind="unlike",
                )
        return None

    def _differs(self, when: str) -> Rejection:
        return Rejection(f"it computes none of the known variants {when}: {self.why}", kind="unlike")

    def _called(self) -> frozenset[Path]:
        """Paths of the children that the fused code calls."""
        if self.subject.module is None:
            return frozenset()
        found: set[Path] = set()

        def listening(twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called: dict[int, None] = {}
            # A hook of everybody's, for an adapter may look whether a child has any of its own.
            hook = register_module_forward_pre_hook(lambda module, _: called.setdefault(id(module)))
            try:
                return function(twin, *args, **kwargs)
            finally:
                hook.remove()
                found.update(path for path, module in _below(twin) if id(module) in called)

        for _, function in self.candidates[:1]:
            for example in self.answered:
                with contextlib.suppress(Exception):
                    run(self.subject, listening, example, gradients=False)
        return frozenset(found)

    def _described(self, adapter: Adapter, watch: Watch, *, uniform: bool) -> Semantics:
        bound = self.subject.module is not None
        main = bound + main_argument(self.answered[0])
        typed = tuple(self._numbered(name) for name in self.proposal.dtypes_of) or (main,)
        rows = [dtypes_in(typed, example, self.subject) for example in self.answered]
        calls = tuple(_calls(self.answered, bound, uniform=uniform))
        return Semantics(adapter, calls, main, typed, tuple(dict.fromkeys(rows)), watch, self._extra(), self.subject.draws)

    def _numbered(self, name: str) -> int | str:
        names = list(inspect.signature(self.subject.original).parameters)
        return names.index(name) if name in names else name

    def _extra(self) -> Extra:
        parameters = inspect.signature(self.subject.original).parameters.values()
        further = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        if further is None:
            return "original"
        if further in self.reading.ignored:
            return "drop"
        example = self.answered[0]
        more = replace(example, kwargs={**example.kwargs, **_AN_EXTRA_KEYWORD})
        return "pass" if self._try(Variation("keyword", "with one more keyword", more)) == "same" else "original"


def _calls(examples: Sequence[Example], bound: bool, *, uniform: bool) -> Iterator[Call]:
    """The ways in which *examples* are called, each once."""
    ways: dict[tuple[int, tuple[str, ...]], list[list[Any]]] = {}
    for example in examples:
        way = (bound + len(example.args), tuple(example.kwargs))
        ways.setdefault(way, []).append([*example.args, *example.kwargs.values()])
    for (count, names), given in ways.items():
        columns = list(zip(*given, strict=True))
        kinds = [frozenset(map(kind_of, column)) for column in columns]
        ranks = [frozenset(value.dim() for value in column if isinstance(value, Tensor)) for column in columns]
        none: list[frozenset[Any]] = [frozenset()] * bound
        every = [frozenset[int]()] * len(columns) if uniform else ranks
        yield Call(count, names, (*none, *kinds), (*none, *every))


def dtypes_in(typed: Sequence[int | str], example: Example, subject: Subject) -> tuple[torch.dtype, ...]:
    """The dtypes that the tensors *typed*, as in `Semantics`, have in *example*."""
    given = [*([None] if subject.module is not None else []), *example.args, *example.kwargs.values()]
    held = [given[each] if isinstance(each, int) else _held(each, example, subject) for each in typed]
    return tuple(each.dtype for each in held)


def _held(name: str, example: Example, subject: Subject) -> Any:
    return example.parameters[name] if name in example.parameters else getattr(subject.module, name)


def _below(module: nn.Module, above: Path = ()) -> Iterator[tuple[Path, nn.Module]]:
    items = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in module._modules.items():
        if child is not None:
            path = (*above, "*" if items else name)
            yield path, child
            yield from _below(child, path)
