"""Examines a module beyond the examples: reads its code, varies the calls, and finds what must be watched."""

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
from ..reading import Path, Reading
from ..subjects import Subject
from ..watch import Extra, Route, VerifiedCalls, Watch
from .branches import Branches
from .changing import another_value
from .comparing import Tolerance, departure
from .outcome import Outcome
from .tried import Likeness, Tried, arguments_of, calls_of, dtypes_in
from .varying import Variation, main_argument, variations
from .watching import Dependence, dependence, route_to

Bound = tuple[Adapter, Callable[..., Any]]
"""A variant that the original may be, and its adapter bound to the reference."""

_FEW = 8
"""Whole numbers up to here in the code are mostly no lengths."""

_AN_EXTRA_KEYWORD = {"num_items_in_batch": 3}
"""One that trainers hand to models."""


@dataclass
class Examination:
    """One original, compared with the variants that it may be.

    Attributes:
        candidate: What it may be.
        subject: The original.
        reading: Of its code.
        variants: Those that have agreed with it in every run so far.
        answered: The examples on which it ran.
        branches: The branches that its code took.
        why: The difference that ruled out the last variant.
    """

    candidate: Candidate
    subject: Subject
    reading: Reading
    variants: Sequence[Bound]
    answered: Sequence[Example]
    branches: Branches
    why: str = field(default="", init=False)

    def semantics(self) -> Semantics | Refusal:
        """Vary calls and state; say which variant the original is and what to watch, or why it is left alone."""
        tried = self._calls_varied()
        if isinstance(tried, Refusal):
            return tried
        adapter = None
        while adapter is not self.variants[0][0]:
            # Again, if what was varied told this one from the original.
            adapter = self.variants[0][0]
            depends = dependence(self.reading, self.subject.module, adapter.reads, self._called())
            if (why := self._state_varied(depends)) is not None:
                return why
        if (why := self._untaken()) is not None:
            return why
        watch = replace(depends.watch, nonempty=tried.nonempty, no_autocast=tried.no_autocast)
        return self._described(adapter, watch, tried)

    def _calls_varied(self) -> Tried | Refusal:
        tried = Tried({each.args[main_argument(each)].dim() for each in self.answered})
        numbers = self.reading.numbers
        # Any whole number in the code may be a length, whether or not it is compared with one.
        sizes = self.reading.sizes | {int(number) for number in numbers if _FEW < number == int(number)}
        clamps = self.reading.clamps or bool(self.reading.branches)
        for variation in variations(self.answered[0], sizes=sizes, numbers=numbers, clamps=clamps):
            answer = self._try(variation)
            if answer == "differs" and variation.kind in ("length", "magnitude", "layout"):
                return self._differs(f"called with an input {variation.label}")
            tried.note(variation, answer)
        return tried

    def _try(self, variation: Variation) -> Likeness:
        """Run the original and every variant on *variation*; drop those that differ, unless all do."""
        gradients = self.candidate.exact or variation.kind != "magnitude"
        how: dict[str, Any] = {"gradients": gradients, **variation.how}
        example = variation.example
        try:
            expected = self.subject.run(self.subject.original, example, **how, watching=self.branches)
        except Exception as error:  # noqa: BLE001 - where the original raises there is nothing to equal
            self.why = f"{type(error).__name__}: {error}"
            return "unanswered"
        same = []
        for adapter, function in self.variants:
            try:
                found = self.subject.run(function, example, **how)
                why = self._compared(found, expected, variation, function, how)
            except Exception as error:  # noqa: BLE001 - a variant that does not fit the module may raise anything
                why = f"its reference raises {type(error).__name__}: {error}"
            if why:
                self.why = f"{adapter.variant}: {why}"
            else:
                same.append((adapter, function))
        self.variants = same or self.variants
        if same:
            self.branches.keep()
        return "same" if same else "differs"

    def _compared(
        self, found: Outcome, expected: Outcome, variation: Variation, function: Callable[..., Any], how: dict[str, Any]
    ) -> str:
        why = found.difference(expected)
        # Matrix products of other sizes are summed in other orders, which need not be the same for all.
        exact = self.candidate.exact and variation.kind not in ("rank", "length", "magnitude", "layout")
        if exact or not why:
            return why
        truth = self.subject.run(function, variation.example, **{**how, "autocast": False}, dtype=torch.float64)
        coarsest = torch.get_autocast_dtype("cpu") if how.get("autocast") else None
        return departure(expected, found, truth, replace(Tolerance.of(self.candidate), coarsest=coarsest))

    def _state_varied(self, depends: Dependence) -> Refusal | None:
        """Refuse what the original reads, the fused code does not, and the guard cannot watch."""
        if depends.unseen:
            return Refusal(f"it depends on what cannot be watched: {'; '.join(depends.unseen[:3])}", kind="unlike")
        if (why := self._untried_class(depends)) is not None:
            return why
        for path in depends.numbers:
            if self._with_another(path) == "differs":
                return self._differs(f"when its {'.'.join(path)} is another number")
        for path in depends.tensors:
            if self._with_another(path) != "same":
                return Refusal(f"it also reads {'.'.join(path)}, a tensor that the kernel does not", kind="unlike")
        return None

    def _untried_class(self, depends: Dependence) -> Refusal | None:
        """Refuse a child that the fused code replaces if its class occurs in no example at that place."""
        tried: dict[Path, set[type]] = {}
        for example in self.answered:
            for name, child in example.children.items():
                for path, module in ((), child), *_below(child):
                    tried.setdefault((name, *path), set()).add(type(module))
        for route, cls in depends.watch.bare:
            path = tuple("*" if step.name.isdigit() else step.name for step in route)
            if path[0] in self.answered[0].children and cls not in tried.get(path, ()):
                where = ".".join(step.name for step in route)
                return Refusal(f"its {where} is a {cls.__name__}, unlike the others that it is with", kind="unlike")
        return None

    def _with_another(self, path: Path) -> Likeness:
        # In the sharpest dtype: with another number a router may choose by a rounding, where examples see to a margin.
        sharpest = min(self.answered, key=lambda each: _eps(each.args[main_argument(each)].dtype))
        return self._try(Variation("number", ".".join(path), sharpest, {"change": another_value(path)}))

    def _untaken(self) -> Refusal | None:
        if not self.reading.branches:
            return None
        called = self._called()
        for branch in self.reading.branches:
            if branch.span is None or branch.source in self.candidate.impossible:
                continue
            if any(branch.inside[:count] in called for count in range(1, len(branch.inside) + 1)):
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
        found: list[set[Path]] = []
        function = self.variants[0][1]

        def listening(twin: nn.Module, *args: Any, **kwargs: Any) -> Any:
            called: dict[int, None] = {}
            # A hook of everybody's, for an adapter may look whether a child has any of its own.
            hook = register_module_forward_pre_hook(lambda module, _: called.setdefault(id(module)))
            try:
                return function(twin, *args, **kwargs)
            finally:
                hook.remove()
                below = [*_below(twin)]
                # Of a list, only what is called of every item.
                missed = {path for path, module in below if id(module) not in called}
                found.append({path for path, _ in below if path not in missed})

        for example in self.answered:
            with contextlib.suppress(Exception):
                self.subject.run(listening, example, gradients=False)
        # Those that it calls every time.
        return frozenset(set.intersection(*found)) if found else frozenset()

    def _described(self, adapter: Adapter, watch: Watch, tried: Tried) -> Semantics:
        bound = self.subject.module is not None
        main = bound + main_argument(self.answered[0])
        typed: tuple[int | Route, ...] = (*self._typed(bound, main), *self._typed_parameter())
        rows = [dtypes_in(typed, example, self.subject) for example in self.answered]
        calls = tuple(calls_of(self.answered, bound, tried))
        accepts = VerifiedCalls(calls, main, typed, tuple(dict.fromkeys(rows)), watch, self._extra())
        return Semantics(self.candidate, adapter, accepts, self.subject.draws)

    def _typed(self, bound: bool, main: int) -> tuple[int, ...]:
        """The main input, and every argument whose dtype differs from the main input's in some example."""

        def differs(at: int) -> bool:
            pairs = ((row[at - bound], row[main - bound].dtype) for row in map(arguments_of, self.answered))
            return any(
                isinstance(value, Tensor)
                and value.is_floating_point() | value.is_complex()
                and value.dtype is not dtype
                for value, dtype in pairs
            )

        ways = ([*range(bound, bound + len(example.args)), *example.kwargs] for example in self.answered)
        # Where every example passes the same argument: by position, the module counted, or by name.
        columns = enumerate(zip(*ways, strict=False), start=bound)
        return (main, *(at for at, column in columns if len({*column}) == 1 and differs(at)))

    def _typed_parameter(self) -> tuple[Route, ...]:
        """One of the module's own tensors, if they have other dtypes in some mixes than in others."""
        module = self.subject.module
        for name in self.answered[0].parameters if module is not None else ():
            dtypes = {each.parameters[name].dtype for each in self.answered if name in each.parameters}
            if len(dtypes) > 1 and module is not None and (route := route_to(module, (name,))) is not None:
                return (route,)
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


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _below(module: nn.Module, above: Path = ()) -> Iterator[tuple[Path, nn.Module]]:
    items = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in module._modules.items():
        if child is not None:
            path = (*above, "*" if items else name)
            yield path, child
            yield from _below(child, path)
