"""What keeps an answer of a kernel's `match` from being used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fuseplug_verify import Adapter

from .contract import Consent, Proposal, Rejection, Scope, Target


def faults_of_answer(answer: Any) -> list[str]:
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
