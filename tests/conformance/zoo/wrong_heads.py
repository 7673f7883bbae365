"""Kernels of a head with lazy scores: each has one fault."""

from dataclasses import replace

import torch
from torch import Tensor

from fuseplug import Consent, Scope, Target

from . import heads
from .heads import CONSENT, HeadAdapter, Scores, match_head
from .kernels import Head


class _Halved(Scores):
    """Becomes half of the scores that it stands for."""

    @classmethod
    def standing_for(cls, make, *inputs, **facts):
        return super().standing_for(lambda *tensors: make(*tensors) * 0.5, *inputs, **facts)


class BecomesSomethingElse(Head):
    def match(self, site):
        return match_head(site, HeadAdapter(lazy=_Halved))


class _HalvedInHalf(Scores):
    """Becomes half of the scores that it stands for in float16, which is not the module's dtype."""

    @classmethod
    def standing_for(cls, make, *inputs, **facts):
        half = inputs[0].dtype is torch.float16
        return super().standing_for(lambda *t: make(*t) * (0.5 if half else 1), *inputs, **facts)


class BecomesSomethingElseInHalf(Head):
    def match(self, site):
        return match_head(site, HeadAdapter(lazy=_HalvedInHalf))


class _Flat(Scores):
    """Stands for rows, whatever the shape of the result."""

    @classmethod
    def standing_for(cls, make, *inputs, **facts):
        return super().standing_for(lambda x, w: make(x, w).reshape(-1, w.shape[0]), *inputs, **facts)


class StandsForAnotherShape(Head):
    def match(self, site):
        return match_head(site, HeadAdapter(lazy=_Flat))


class ForgetsAutocast(Head):
    """Its lazy result has the dtype of its inputs under autocast, too."""

    def match(self, site):
        return match_head(site, HeadAdapter(under_autocast=True))


class _Unscaled(Scores):
    """Ignores that the model multiplied it."""

    def foreseen(self, function, args, kwargs):
        if function in (Tensor.mul, Tensor.__mul__):
            return self.then(function, args, kwargs)
        return super().foreseen(function, args, kwargs)


class ForgetsAStep(Head):
    """Its loss is the loss of the head's scores, whatever the model did to them before."""

    def match(self, site):
        return match_head(site, HeadAdapter(lazy=_Unscaled))


class NeverInItsScope(Head):
    """Its scope looks at an argument that is never given."""

    def match(self, site):
        return match_head(site, scope=Scope(_with_targets))


def _with_targets(module, arguments):
    return arguments.get("targets") is not None


class RaisesInItsScope(Head):
    """Its scope expects an argument that the specimens do not have."""

    def match(self, site):
        return match_head(site, scope=Scope(_with_mandatory_targets))


def _with_mandatory_targets(module, arguments):
    return arguments["targets"] is not None


class ScopeOfNoMethod(Head):
    """Its scope names a method that the specimens do not have."""

    def match(self, site):
        return match_head(site, scope=Scope(heads.with_labels, "training_step"))


class NewScopeEachTime(Head):
    """Its scopes do not compare by value."""

    def match(self, site):
        return match_head(site, scope=Scope(lambda module, arguments: arguments["labels"] is not None))


class WithoutInputs(Head):
    """Its specimen does not say how to call it."""

    specimens = "conformance.zoo.specimens:without_inputs"


class AsksForNothing(Head):
    """Asks for consent, but does not say what the user gives up."""

    def match(self, site):
        return match_head(site, consent=Consent("lazy_scores", " "))


class AsksWithoutAWord(Head):
    """Asks for consent without a word with which to give it."""

    def match(self, site):
        return match_head(site, consent=Consent("", CONSENT.gives_up))


class HeadElsewhere(Head):
    """The path of its target leads nowhere."""

    def match(self, site):
        found = match_head(site)
        return found and [replace(found[0], target=Target(path="lm_head"))]
