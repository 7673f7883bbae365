"""Kernels with right numbers that break another rule: each has one fault."""

import itertools
import random
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from . import reference, sites
from .kernels import Gated, Norm, Product
from .sites import CallsAChild, NormAdapter

_serial = itertools.count()


class SetsAnAttribute(Norm):
    """Its match sets an attribute on the module."""

    def match(self, site):
        site.module.__dict__["seen"] = True
        return super().match(site)


class Unsteady(Norm):
    """Its adapters differ each time."""

    def match(self, site):
        names = (f"plain {next(_serial)}", "offset")
        return sites.match_norm(site, tuple(NormAdapter(name, float(i)) for i, name in enumerate(names)))


class Rolls(Norm):
    """Its match draws random numbers."""

    def match(self, site):
        random.random()
        return super().match(site)


class Presumptuous(Norm):
    """Its match takes it for granted that every module is one of its own."""

    def match(self, site):
        return super().match(site) if site.module.weight.dim() == 1 else None


class ClaimsMore(Norm):
    """It names a variant that no specimen has."""

    def match(self, site):
        return sites.match_norm(
            site, tuple(NormAdapter(name, i) for i, name in enumerate(("plain", "offset", "twice")))
        )


@dataclass(frozen=True)
class _ByItself(NormAdapter):
    def bind(self, compute):
        return lambda module, x: reference.norm(x, module.weight, module.eps, self.offset)


class ByItself(Norm):
    """Its adapter never calls the kernel."""

    def match(self, site):
        return sites.match_norm(site, (_ByItself("plain", 0.0), _ByItself("offset", 1.0)))


@dataclass(frozen=True)
class _Notes(NormAdapter):
    def bind(self, compute):
        def forward(module, x):
            module.last_shape = x.shape
            return compute(x, module.weight, module.eps, self.offset)

        return forward


class NotesOnTheModule(Norm):
    """Its adapter leaves an attribute on the module."""

    def match(self, site):
        return sites.match_norm(site, (_Notes("plain", 0.0), _Notes("offset", 1.0)))


@dataclass(frozen=True)
class _Unpicklable(NormAdapter):
    def bind(self, compute):
        def forward(module, x):
            module.__dict__.setdefault("_call", lambda x: compute(x, module.weight, module.eps, self.offset))
            return module._call(x)

        return forward


class CannotBePickled(Norm):
    """Its adapter keeps a closure on the module: it cannot be pickled, and a copy computes with the old weights."""

    def match(self, site):
        return sites.match_norm(site, (_Unpicklable("plain", 0.0), _Unpicklable("offset", 1.0)))


@dataclass(frozen=True)
class _RemembersDtype(NormAdapter):
    def bind(self, compute):
        def forward(module, x):
            dtype = module.__dict__.setdefault("_dtype", x.dtype)
            return compute(x, module.weight, module.eps, self.offset).to(dtype)

        return forward


class RemembersTheDtype(Norm):
    """Its adapter notes the dtype at the first call, and misses later changes of the module."""

    def match(self, site):
        return sites.match_norm(site, (_RemembersDtype("plain", 0.0), _RemembersDtype("offset", 1.0)))


def _with_example(example):
    def match(self, site):
        found = sites.match_norm(site)
        return found and [replace(found[0], example=lambda *args: example(found[0].example, *args))]

    return match


class IgnoresTheGenerator(Norm):
    """Its examples are drawn from the generator of the process."""

    match = _with_example(lambda make, mix, size, generator: make(mix, size, torch.default_generator))


class OneExample(Norm):
    """Its examples are all the same."""

    match = _with_example(lambda make, mix, size, generator: make(mix, size, torch.Generator().manual_seed(0)))


class SmallExamples(Norm):
    """Its examples are small, whatever size is asked for."""

    match = _with_example(lambda make, mix, size, generator: make(mix, 64, generator))


class OtherMixFirst(Norm):
    """Its first mix is not the module's own."""

    def match(self, site):
        found = sites.match_norm(site)
        return found and [replace(found[0], mixes=sorted(found[0].mixes, key=lambda mix: mix[1] is torch.float32))]


class NoSpecimens(Norm):
    specimens = ""


class ForeignSpecimens(Norm):
    """Its specimens are modules that it does not fuse."""

    specimens = "conformance.zoo.specimens:gates"


class RaisingSpecimens(Norm):
    specimens = "conformance.zoo.adapters:raises"


def raises():
    raise LookupError("no such model")


class UnlikeSpecimens(Gated):
    """Its specimens do not compute what its reference computes."""

    specimens = "conformance.zoo.specimens:halves"


class NoFunction(Norm):
    function = "conformance.zoo.right:nowhere"


class RefersToNothing(Norm):
    """Its reference raises for an input that the original accepts."""

    reference = "conformance.zoo.reference:norm_of_something"


class NoSizes(Norm):
    check_sizes = ()


class NotDeclared(Norm):
    op = ""
    priority = "high"


@dataclass(frozen=True)
class _SaysLess(NormAdapter):
    reads: ClassVar[tuple[str, ...]] = ("weight",)


@dataclass(frozen=True)
class _SaysMore(NormAdapter):
    reads: ClassVar[tuple[str, ...]] = ("weight", "eps", "scale")


@dataclass(frozen=True)
class _SaysNothingOfVars(NormAdapter):
    reads: ClassVar[tuple[str, ...]] = ("weight",)

    def bind(self, compute):
        return lambda module, x: compute(x, module.weight, vars(module)["eps"], self.offset)


class SaysLess(Norm):
    """Its adapter reads a number that it does not declare."""

    def match(self, site):
        return sites.match_norm(site, (_SaysLess("plain", 0.0), _SaysLess("offset", 1.0)))


class SaysMore(Norm):
    """Its adapter declares a name that it does not read."""

    def match(self, site):
        return sites.match_norm(site, (_SaysMore("plain", 0.0), _SaysMore("offset", 1.0)))


class SaysNothingOfVars(Norm):
    """Its adapter reads a number in a way that cannot be observed."""

    def match(self, site):
        return sites.match_norm(site, (_SaysNothingOfVars("plain", 0.0), _SaysNothingOfVars("offset", 1.0)))


@dataclass(frozen=True)
class _SaysNothingOfAChild(CallsAChild):
    def bind(self, compute):
        def forward(module, x):
            gate, up = x.chunk(2, -1)
            return compute(torch.nn.functional.prelu(gate, module.act.weight), up)

        return forward


class SaysNothingOfAChild(Product):
    """Its adapter reads a parameter of a child, and does not call the child."""

    def match(self, site):
        return sites.match_product(site, _SaysNothingOfAChild())
