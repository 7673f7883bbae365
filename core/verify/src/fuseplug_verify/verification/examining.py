"""Examines an original, also beyond the examples: varies calls and state, and finds what must be watched."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..data import Adapter, Candidate, Example, Refusal, Semantics
from ..reading.findings import Path, Reading
from ..safe_access import said_by
from ..subjects import Subject
from ..watch import Extra, VerifiedCalls, Watch
from .branches import Branches
from .changing import another_value
from .comparing import Tolerance, departure
from .evidence import Evidence
from .examples import mixes_run
from .outcome import Outcome
from .tried import Likeness, Tried, arguments_of, calls_of, dtypes_in
from .varying import Variation, describe, main_argument, variations
from .watching import Dependence, dependence, is_below

Bound = tuple[Adapter, Callable[..., Any]]
"""The adapter of a variant that the original may be, and the function that it makes of the reference."""

_FEW = 8
"""Whole numbers up to this one in the code are mostly not lengths."""

_AN_EXTRA_KEYWORD = {"num_items_in_batch": 3}
"""A keyword argument that trainers pass to models."""


@dataclass
class Examination:
    """One original, compared with the variants that it may be.

    Attributes:
        candidate: What the original may be.
        subject: The original.
        reading: The reading of its code.
        variants: The variants that have agreed with it in every run so far.
        examples: One for each mix.
        answered: The examples on which it ran.
        differentiable: Whether it ran with gradients. An original that writes into what it keeps for its backward
            raises.
        branches: The branches that its code took.
        evidence: What it did on the examples.
        why: The difference that ruled out the last variant, or the error that the original raised.
    """

    candidate: Candidate
    subject: Subject
    reading: Reading
    variants: Sequence[Bound]
    examples: Sequence[Example]
    answered: list[Example] = field(default_factory=list, init=False)
    differentiable: bool = field(default=True, init=False)
    branches: Branches = field(init=False)
    evidence: Evidence = field(default_factory=Evidence, init=False)
    why: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self.branches = Branches(self.reading.codes)

    def semantics(self) -> Semantics | Refusal:
        """Find which variant the original is, for which calls, and what to watch; or why it is left alone.

        The original runs on the examples first, then with calls and state varied.
        """
        tried = self._unlike_examples() or self._calls_varied()
        if isinstance(tried, Refusal):
            return tried
        adapter = None
        while adapter is not self.variants[0][0]:
            # Repeated if varying the state ruled this variant out.
            adapter = self.variants[0][0]
            depends = dependence(self.reading, self.subject.module, adapter.reads, self._called())
            if (why := self._state_varied(depends)) is not None:
                return why
        if (why := self._untaken()) is not None:
            return why
        limits = {"nonempty": tried.nonempty, "no_autocast": tried.no_autocast, "no_grad": not self.differentiable}
        watch = Watch(tuple(depends.terms), **limits)
        self.evidence.code(self.reading.codes)
        return self._described(adapter, watch, tried)

    def _unlike_examples(self) -> Refusal | None:
        for variation in self._as_they_are():
            answer = self._try(variation)
            if answer == "differs":
                likeliest = f"of {len(self.candidate.adapters)} tried, the likeliest is {self.why} ({variation.label})"
                return Refusal(f"computes none of the known variants; {likeliest}", kind="unlike")
            if answer == "same" and not any(variation.example is example for example in self.answered):
                self.differentiable = bool(self.answered and self.differentiable) or variation.options["gradients"]
                self.answered.append(variation.example)
        if not self.answered:
            return Refusal(f"its own forward cannot be run on examples: {self.why}", kind="unlike")
        return None

    def _as_they_are(self) -> Iterator[Variation]:
        """The examples. The first is also tried with the other training flag, and without gradients.

        A module may be planned in one mode and run in another.
        """
        first, *others = self.examples
        for gradients in (True, False):
            yield self._as_it_is(first, gradients=gradients)
            if (flag := _flag(self.subject, first)) is not None:
                yield self._as_it_is(first, gradients=gradients, training=not flag)
        for example in others:
            yield self._as_it_is(example, gradients=self.differentiable)

    def _as_it_is(self, example: Example, *, gradients: bool, training: bool | None = None) -> Variation:
        flag = _flag(self.subject, example) if training is None else training
        mode = "" if flag is None else "in training, " if flag else "in eval, "
        label = f"for {describe(example)}, {mode}{'with' if gradients else 'without'} gradients"
        return Variation("example", label, example, {"training": training, "gradients": gradients})

    def _calls_varied(self) -> Tried | Refusal:
        tried = Tried({example.args[main_argument(example)].dim() for example in self.answered})
        numbers = self.reading.numbers
        # Any whole number in the code may be a length, whether or not it is compared with one.
        sizes = {*map(abs, self.reading.sizes), *(int(n) for n in map(abs, numbers) if _FEW < n == int(n))}
        clamps = self.reading.clamps or bool(self.reading.branches)
        for variation in variations(self.answered[0], sizes=sizes, numbers=numbers, clamps=clamps):
            answer = self._try(variation)
            if answer == "differs" and variation.kind in ("length", "magnitude", "layout"):
                return self._differs(f"called with an input {variation.label}")
            tried.note(variation, answer)
        return tried

    def _try(self, variation: Variation) -> Likeness:
        """Run the original and every variant on *variation*; drop those that differ, unless all do."""
        gradients = self.differentiable and (self.candidate.exact or variation.kind != "magnitude")
        options: dict[str, Any] = {"gradients": gradients, **variation.options}
        try:
            expected = self.subject.run(self.subject.original, variation.example, **options, watching=self.branches)
        except Exception as error:  # noqa: BLE001 - where the original raises, there is nothing to equal
            self.why = said_by(error)
            return "unanswered"
        if variation.kind == "example":
            self.evidence.ran(expected)
        differences = [self._difference(expected, variation, function, options) for _, function in self.variants]
        if all(differences):
            self.why = f"{self.variants[0][0].variant}: {differences[0]}"
            return "differs"
        self.variants = [
            variant for variant, difference in zip(self.variants, differences, strict=True) if not difference
        ]
        self.branches.keep()
        return "same"

    def _difference(
        self, expected: Outcome, variation: Variation, function: Callable[..., Any], options: dict[str, Any]
    ) -> str:
        """How a variant, bound to the reference, differs from the original; ``""`` if it does not."""
        try:
            outcome = self.subject.run(function, variation.example, **options)
            why = outcome.difference(expected)
            # Matrix products of other sizes may add in other orders, not the same in the original and the reference.
            exact = self.candidate.exact and variation.kind not in ("rank", "length", "magnitude", "layout")
            if exact or not (why or variation.kind == "example"):
                return why
            truth = self.subject.run(function, variation.example, **{**options, "autocast": False}, dtype=torch.float64)
            coarsest = torch.get_autocast_dtype("cpu") if options.get("autocast") else None
            return departure(expected, outcome, truth, replace(Tolerance.of(self.candidate), coarsest=coarsest))
        except Exception as error:  # noqa: BLE001 - a variant that does not fit the module may raise anything
            return f"its reference raises {said_by(error)}"

    def _state_varied(self, depends: Dependence) -> Refusal | None:
        """Refuse an original that reads what the fused code does not read and the guard cannot watch."""
        if depends.unseen:
            return Refusal(f"it depends on what cannot be watched: {'; '.join(depends.unseen[:3])}", kind="unlike")
        if (why := self._untried_class(depends)) is not None:
            return why
        for path in (tuple(step.name for step in term.route) for term in depends.terms if term.kind == "number"):
            if self._with_another(path) == "differs":
                return self._differs(f"when its {'.'.join(path)} is another number")
        for path in depends.tensors:
            if self._with_another(path) != "same":
                return Refusal(f"it also reads {'.'.join(path)}, a tensor that the kernel does not", kind="unlike")
        return None

    def _untried_class(self, depends: Dependence) -> Refusal | None:
        """Refuse a child that the fused code replaces if no example has a child of its class at that path."""
        tried: dict[Path, set[type]] = {}
        for example in self.answered:
            for name, child in example.children.items():
                for path, module in ((), child), *_below(child):
                    tried.setdefault((name, *path), set()).add(type(module))
        for term in depends.terms:
            path = tuple("*" if step.name.isdigit() else step.name for step in term.route)
            cls = term.value.value
            if term.kind == "bare" and path[0] in self.answered[0].children and cls not in tried.get(path, ()):
                where = ".".join(step.name for step in term.route)
                return Refusal(f"its {where} is a {cls.__name__}, which no example has in its place", kind="unlike")
        return None

    def _with_another(self, path: Path) -> Likeness:
        # In the finest dtype: examples give a router's choice a margin, but with another number, a rounding may decide.
        sharpest = max(self.answered, key=lambda each: each.args[main_argument(each)].dtype.itemsize)
        return self._try(Variation("number", ".".join(path), sharpest, {"change": another_value(path)}))

    def _untaken(self) -> Refusal | None:
        if not self.reading.branches:
            return None
        called = self._called()
        for branch in self.reading.branches:
            if branch.span is None or branch.source in self.candidate.impossible or is_below(branch.inside, called):
                continue
            if self.branches.one_sided(branch.file, branch.span):
                return Refusal(
                    f"it has a branch that no example takes both ways, so what it does there is not known: "
                    f"{branch.text}",
                    kind="unlike",
                )
        return None

    def _differs(self, when: str) -> Refusal:
        return Refusal(f"it computes none of the known variants {when}: {self.why}", kind="unlike")

    def _called(self) -> frozenset[Path]:
        """The paths of the children that the fused code calls."""
        if self.subject.module is None:
            return frozenset()
        paths_called: list[set[Path]] = []
        function = self.variants[0][1]

        def listening(twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called: dict[int, None] = {}
            # A hook of all modules, because an adapter may check whether a child has hooks of its own.
            hook = register_module_forward_pre_hook(lambda module, _: called.setdefault(id(module)))
            try:
                return function(twin, *args, **kwargs)
            finally:
                hook.remove()
                below = [*_below(twin)]
                # In a list, only the paths that are called in every item.
                missed = {path for path, module in below if id(module) not in called}
                paths_called.append({path for path, _ in below if path not in missed})

        for example in self.answered:
            with contextlib.suppress(Exception):
                self.subject.run(listening, example, gradients=False)
        # Only those that it calls for every example.
        return frozenset(set.intersection(*paths_called)) if paths_called else frozenset()

    def _described(self, adapter: Adapter, watch: Watch, tried: Tried) -> Semantics:
        bound = self.subject.module is not None
        main = bound + main_argument(self.answered[0])
        typed: tuple[int | str, ...] = (*self._typed(bound, main), *self._typed_parameter())
        rows = [dtypes_in(typed, example, self.subject) for example in self.answered]
        pairs, run = zip(self.candidate.mixes, self.examples, strict=True), mixes_run(self.candidate)
        # A kernel is run in these, so the guard lets no other calls through.
        examples = [example for mix, example in pairs if mix in run and any(example is one for one in self.answered)]
        accepts = VerifiedCalls(
            tuple(calls_of(examples, bound, tried)), main, typed, tuple(dict.fromkeys(rows)), watch, self._extra()
        )
        return Semantics(self.candidate, adapter, accepts, self.subject.draws, self.evidence.digest())

    def _typed(self, bound: bool, main: int) -> tuple[int, ...]:
        """The main input, and every argument whose dtype differs from the main input's in some example."""
        rows = [arguments_of(example) for example in self.answered]
        mains = [row[main - bound].dtype for row in rows]
        # Columns where every example passes the same argument, by position or by name; numbers count the module.
        names = ([*range(len(example.args)), *example.kwargs] for example in self.answered)
        columns = enumerate(zip(zip(*names, strict=False), zip(*rows, strict=False), strict=True), start=bound)
        same = ((at, values) for at, (column, values) in columns if len({*column}) == 1)
        return (main, *(at for at, values in same if any(map(_is_of_other_dtype, values, mains))))

    def _typed_parameter(self) -> tuple[str, ...]:
        """One of the module's own tensors whose dtype differs between mixes, if there is one."""
        for name in self.answered[0].parameters:
            if len({example.parameters[name].dtype for example in self.answered if name in example.parameters}) > 1:
                return (name,)
        return ()

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


def _flag(subject: Subject, example: Example) -> bool | None:
    """The training flag of the twin; ``None`` for a function."""
    if subject.module is None:
        return None
    return bool(example.attributes.get("training", subject.module.training))


def _is_of_other_dtype(value: Any, dtype: torch.dtype) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() | value.is_complex() and value.dtype is not dtype


def _below(module: nn.Module, above: Path = ()) -> Iterator[tuple[Path, nn.Module]]:
    items = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in module._modules.items():
        if child is not None:
            path = (*above, "*" if items else name)
            yield path, child
            yield from _below(child, path)
