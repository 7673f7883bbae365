"""Checks that do not run the kernel: what it declares, what importing it does, how it answers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import importlib_metadata
import torch
from torch import Tensor, nn

from fuseplug.contract import Answer, Consent, Site
from fuseplug.hookspecs import ENTRY_POINT_GROUP, resolve
from fuseplug.planning.snapshot import Snapshot
from fuseplug_verify import Candidate, Example

from .attempts import raised
from .edges import arguments
from .importing.fresh_python import ask
from .importing.process_state import ProcessState
from .public_names import used_by
from .results import Finding
from .subjects import Case, Examined, Specimen

_NOBODYS_BUSINESS = (
    nn.Module,
    nn.Identity,
    nn.ModuleList,
    nn.Sequential,
    nn.SiLU,
    lambda: nn.Linear(4, 4),
    lambda: nn.Embedding(4, 4),
    lambda: nn.LayerNorm(4),
    lambda: nn.Conv1d(4, 4, 2),
    lambda: nn.MultiheadAttention(4, 2),
)


def declaration(examined: Examined) -> Iterator[Finding]:
    """The kernel's fields are valid, its id is that of its entry point, and the functions it names can be imported."""
    for fault in examined.broken:
        yield Finding("", fault=fault)
    if examined.kernel is None:
        return
    kernel, cls = examined.kernel, type(examined.kernel)
    yield Finding("kernel_id", fault=_wrong_entry_point(cls))
    for field in ("function", "reference", "specimens"):
        if field == "function" and examined.device is None:
            yield Finding(field, skipped=examined.absent)
        elif path := getattr(kernel, field):
            yield Finding(field, fault=_not_importable(path))
    yield Finding("specimens", fault=examined.no_specimens)


def imports(examined: Examined) -> Iterator[Finding]:
    """Importing the kernel's module does not import torch, and changes, prints and starts nothing.

    Importing its functions changes and prints nothing, either. Its package uses no private names of Fuseplug.
    """
    kernel = examined.sound
    for fault in used_by(type(kernel).__module__):
        yield Finding("", fault=fault)
    functions = [kernel.reference] + ([] if examined.device is None else [kernel.function])
    if examined.depth == "quick":  # another Python would import torch for them, which takes seconds
        functions = []
    module = type(kernel).__module__
    try:
        found = ask(module, functions, before_torch=_stand_in())
    except ImportError as error:
        yield Finding("", skipped=f"{module} cannot be imported in another Python ({str(error)[:100]})")
        return
    for what in found or [""]:
        yield Finding("", fault=what)


def variants(examined: Examined) -> Iterator[Finding]:
    """Every variant that the kernel's proposals name is found on some specimen, if only to be declined.

    In a name of several words (``"gelu gate-first"``), each word is a choice: every word must be found, but not every
    combination.
    """
    found = _traits(case.semantics.adapter.variant for specimen in examined.specimens for case in specimen.cases)
    found |= _traits(variant for specimen in examined.specimens for variant in specimen.declined)
    claimed = _traits(variant for specimen in examined.specimens for variant in specimen.claimed)
    for word in claimed:
        lacking = "is claimed, and found on no specimen: add a module that has it, or stop claiming it"
        yield Finding(word, fault="" if word in found else lacking)


def _traits(variants: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(word for variant in variants for word in variant.split())


def match(specimen: Specimen) -> Iterator[Finding]:
    """``match`` only looks at a module, gives the same answer twice, and does not fail on other modules."""
    examined = specimen.examined
    for place, site in specimen.sites():
        before = ProcessState((type(place.module),))
        snapshot = Snapshot([site.module])
        first, again = (examined.sound.propose(site=site) for _ in range(2))
        where = place.paths[0]
        yield Finding(where, fault="it changed the module it was asked about" if snapshot.changed() else "")
        yield Finding(where, fault="; ".join(before.changed()))
        yield Finding(where, fault=_told_apart(first, again))
        if first and first.rejection and first.rejection.kind == "error":
            yield Finding(where, fault=first.rejection.reason)
        for proposal in first.proposals if first else ():
            if proposal.consent is not None:
                yield Finding(where, fault=_lacking(proposal.consent))
    if specimen.number == 0:
        yield from _other_modules(examined)


def fuses(specimen: Specimen) -> Iterator[Finding]:
    """Part of the specimen is fused; its own forward equals a variant bit for bit."""
    if specimen.all_declined:
        yield Finding("", skipped=specimen.all_declined)
        return
    said = "; ".join(specimen.why_not) or "none of its modules has the kernel's op"
    remedy = "let match() propose what fits it (adapter, example, mixes), or take it out of the specimens"
    yield Finding("", fault="" if specimen.cases else f"nothing of it is fused: {said}: {remedy}")


def examples(case: Case) -> Iterator[Finding]:
    """Equal generators make equal examples, others make others; nothing else is drawn from; sizes and dtypes fit."""
    proposal = case.proposal
    for mix in proposal.mixes:
        before = ProcessState()
        one, two, other = (
            proposal.example(mix, Candidate.SMALL, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
        )
        where = f"{mix}"
        yield Finding(where, fault="; ".join(before.changed()))
        same = _same_example(one, two)
        yield Finding(
            where, fault="" if same else "it differs for generators at the same point: draw from the given one"
        )
        varied = not _same_example(one, other)
        yield Finding(
            where, fault="" if varied else "it is the same for every generator: stale results would go unseen"
        )
        away = {t.device.type for t in _tensors(one)} - {"cpu"}
        yield Finding(where, fault=f"it has tensors on {', '.join(sorted(away))}, not on the CPU" if away else "")
    largest = max(case.examined.sound.check_sizes)
    elements = case.example(size=largest).args[0].numel()
    short = (
        f"{elements} elements in the main input where at least {largest} are asked for: the kernel is not checked there"
    )
    yield Finding(f"size {largest}", fault="" if elements >= largest // 2 else short)
    if case.subject.module is not None:
        odd = _of_another_dtype(case.subject.module, case.example())
        fault = f"{odd}: put the module's own mix first in mixes, or its own calls go to the original" if odd else ""
        yield Finding(f"{proposal.mixes[0]}, the first of mixes", fault=fault)


def _of_another_dtype(module: nn.Module, example: Example) -> str:
    """The first tensor of *example* whose dtype is not that of *module*'s tensor of this name; ``""`` if none is."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = dict(example.parameters)
    for name, child in example.children.items():
        tensors = (*child.named_parameters(), *child.named_buffers())
        given |= {f"{name}.{inner}": tensor for inner, tensor in tensors}
    for name, tensor in given.items():
        if name in own and own[name].dtype != tensor.dtype:
            return f"{name} is {tensor.dtype}, and the module's {own[name].dtype}"
    return ""


def _wrong_entry_point(cls: type) -> str:
    own = f"{cls.__module__}:{cls.__qualname__}"
    for entry in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.value.partition("[")[0].strip() == own and entry.name != getattr(cls, "kernel_id", ""):
            return f"is {getattr(cls, 'kernel_id', '')!r}, and its entry point is named {entry.name!r}: make them equal"
    return ""


def _stand_in() -> str:
    """The function that loads the NPU in host memory, for another Python; ``""`` if this one has not loaded it."""
    loading = sys.modules.get("fuseplug_host_npu.loading")
    return "fuseplug_host_npu:load" if loading is not None and loading.is_loaded() else ""


def _not_importable(path: str) -> str:
    try:
        found = resolve(path)
    except Exception as error:  # noqa: BLE001 - a third party's module may raise anything
        return f"{path} cannot be imported: {raised(error)}"
    return "" if callable(found) else f"{path} is {type(found).__name__}, not a function"


def _told_apart(first: Answer | None, again: Answer | None) -> str:
    def told(answer: Answer | None) -> Any:
        if answer is None:
            return None
        offers = [
            [
                (part.target, tuple(part.adapters), tuple(part.mixes), tuple(part.covers), part.lazy)
                for part in proposal.all_targets
            ]
            for proposal in answer.proposals
        ]
        return offers, [(proposal.scope, proposal.consent) for proposal in answer.proposals], answer.rejection

    if told(first) == told(again):
        return ""
    return (
        "it gives different answers when asked twice about one module (adapters and mixes must be equal by value: "
        "frozen dataclasses; what a scope asks, the same function): every module would be checked and compiled for anew"
    )


def _lacking(consent: Consent) -> str:
    """What *consent* lacks for a user to agree; ``""`` if it lacks nothing."""
    if not (isinstance(consent.word, str) and consent.word.isidentifier()):
        return f"it asks for the consent {consent.word!r}, which is no word: users write allow=[word]"
    if not (isinstance(consent.gives_up, str) and len(consent.gives_up.split()) > 1):
        return (
            f"it asks for the consent {consent.word!r} and does not say what is given up: a sentence in gives_up, "
            f"which the report quotes, not {consent.gives_up!r}"
        )
    return ""


def _other_modules(examined: Examined) -> Iterator[Finding]:
    for make in _NOBODYS_BUSINESS:
        module = make()
        answer = examined.sound.propose(site=Site("", module.to("meta"), examined.device_type, examined.mode))
        said = answer.rejection if answer is not None else None
        wrong = said.reason if said is not None and said.kind == "error" else ""
        yield Finding(f"asked about {module}".splitlines()[0], fault=wrong)


def _same_example(one: Example, other: Example) -> bool:
    pairs = list(zip(_tensors(one), _tensors(other), strict=False))
    return len(_tensors(one)) == len(_tensors(other)) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs
    )


def _tensors(example: Example) -> list[Tensor]:
    found = [value for value in arguments(example) if isinstance(value, Tensor)]
    found += example.parameters.values()
    for child in example.children.values():
        found += copy.copy(child).state_dict().values()
    return found
