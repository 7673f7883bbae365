"""The two questions, each asked once: what does this compute, and does that compute the same?"""

from __future__ import annotations

import torch
from torch import nn

from .data import Candidate, Compute, Conditions, Refusal, Semantics
from .subjects import Subject
from .verification.verifier import Verifier


def examine(subject: nn.Module | Subject, candidate: Candidate) -> Semantics | Refusal:
    """Find which variant of *candidate* the original is, and for which calls: on the CPU, on a copy of the module.

    Args:
        subject: A module, whose class's ``forward`` is the original; or a method or function of another name.
        candidate: What it may be, and the examples that show it.
    """
    what = _subject(subject)
    return what if isinstance(what, Refusal) else Verifier().examine(what, candidate)


def check(
    semantics: Semantics,
    subject: nn.Module | Subject,
    compute: Compute,
    device: torch.device | str = "cpu",
    *,
    gradients: bool = True,
) -> Conditions | Refusal:
    """Run *compute* on *device* against the original there and the reference in float64; say when it is right.

    Args:
        semantics: What `examine` answered for *subject*.
        subject: The module, or the method or function.
        compute: What is to replace it: it has the signature of the reference, or of the original if there is none.
        device: Where it is to run.
        gradients: Whether gradients are compared, too.
    """
    what = _subject(subject)
    if isinstance(what, Refusal):
        return what
    return Verifier(gradients=gradients).check(semantics, what, compute, torch.device(device))


def _subject(subject: nn.Module | Subject) -> Subject | Refusal:
    return subject if isinstance(subject, Subject) else Subject.of_method(subject, type(subject).forward)
