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
    target, found = answer.target, []
    if not (isinstance(target, Target) and isinstance(target.method, str) and isinstance(target.function, str | None)):
        found.append(f"target must be a Target of names, not {target!r}")
    if not answer.adapters or not all(isinstance(a, Adapter) and hasattr(a, "variant") for a in answer.adapters):
        found.append(f"adapters must be Adapters with a variant, at least one, not {answer.adapters!r}")
    if not answer.mixes:
        found.append("mixes must be at least one")
    for name, what in (("covers", "paths"), ("impossible", "conditions"), ("dtypes_of", "names")):
        given = getattr(answer, name)
        if isinstance(given, str) or not all(isinstance(each, str) for each in given):
            found.append(f"{name} must be {what}, not {given!r}")
    if not callable(answer.example):
        found.append(f"example must be callable, not {answer.example!r}")
    found += [
        f"{name} must be a number, not {getattr(answer, name)!r}"
        for name in ("roundings", "working_roundings")
        if not isinstance(getattr(answer, name), int | float)
    ]
    if not isinstance(answer.work, int | float) or not answer.work > 0:
        found.append(f"work must be a positive number, not {answer.work!r}")
    found += _faults_of_company(answer)
    if not isinstance(answer.exact, bool):
        found.append(f"exact must be True or False, not {answer.exact!r}")
    try:
        hash((tuple(answer.adapters), tuple(answer.mixes)))
    except TypeError as error:
        found.append(f"adapters and mixes must be hashable (adapters: frozen dataclasses): {error}")
    return found


def _faults_of_company(answer: Proposal) -> list[str]:
    """What is wrong with what goes with the target: other targets, a scope, a consent."""
    found = []
    for name, kind in (("scope", Scope), ("consent", Consent), ("lazy", type)):
        given = getattr(answer, name)
        if given is not None and not isinstance(given, kind):
            found.append(f"{name} must be a {kind.__name__} or None, not {given!r}")
    for each in answer.beside:
        if not isinstance(each, Proposal) or each.beside or each.scope or each.consent:
            found.append(f"beside must be Proposals without beside, scope and consent of their own, not {each!r:.80}")
        else:
            found += _faults_of_proposal(each)
    return found
