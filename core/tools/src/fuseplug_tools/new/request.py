"""The checked arguments of ``fuseplug new``."""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fuseplug.discovery.ownership import normal
from fuseplug.errors import FuseplugError

from .known_ops import KNOWN_OPS, NOT_TEMPLATES, KnownOp

BACKENDS = ("inductor", "triton", "npu")
PREFIX = "fuseplug-"

_OURS = {
    *(op.distribution for op in KNOWN_OPS.values()),
    *(PREFIX + op.replace("_", "-") for op in NOT_TEMPLATES),
    *(PREFIX + name for name in ("backends", "host-npu", "liger", "testing", "tools", "verify")),
}

_NAMES_IN_TEMPLATES = """
x y self module compute forward training wide row column inside width reference functional functools torch tl triton
operation recomputed transparent have_model_dtypes example match specimens
"""
_TAKEN_BY_TEMPLATES = dict.fromkeys(_NAMES_IN_TEMPLATES.split(), "the templates use it")


@dataclass(frozen=True)
class Request:
    """A distribution to write.

    Attributes:
        stem: The name without ``fuseplug-``, as an identifier.
        op: A key of `KNOWN_OPS`, or a new op.
        backend: One of `BACKENDS`.
        tensors: Parameters and buffers of a module with a new op.
        numbers: The other attributes of such a module, each with a value.
    """

    stem: str
    op: str
    backend: str
    tensors: tuple[str, ...] = ()
    numbers: tuple[tuple[str, float], ...] = ()

    @property
    def known_op(self) -> KnownOp | None:
        """The op, if it exists already."""
        return KNOWN_OPS.get(self.op)

    @property
    def distribution(self) -> str:
        """``fuseplug-layernorm``."""
        return PREFIX + self.stem.replace("_", "-")

    @property
    def package(self) -> str:
        """``fuseplug_layernorm``."""
        return f"fuseplug_{self.stem}"

    @property
    def kernel_id(self) -> str:
        """``inductor_fused_layernorm``."""
        return f"{self.backend}_fused_{self.stem}"


def request_of(name: str, *, op: str, backend: str, params: str) -> Request:
    """Check the arguments of ``fuseplug new``.

    Raises:
        FuseplugError: If an argument is invalid.
    """
    stem = _stem(name)
    if backend not in BACKENDS:
        raise FuseplugError(f"--backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if op in NOT_TEMPLATES:
        raise FuseplugError(f"there is no template for --op {op}: {NOT_TEMPLATES[op]}")
    if op in KNOWN_OPS:
        if params:
            raise FuseplugError(
                f"--params is {params!r}; expected none with --op {op}, whose modules {KNOWN_OPS[op].distribution} "
                "recognises: leave it out"
            )
        return Request(stem, op, backend)
    op = op or stem
    _check_identifier("--op", op, instance="soft_cap", taken=_TAKEN_BY_TEMPLATES)
    tensors, numbers = _params(params, op)
    return Request(stem, op, backend, tensors, numbers)


def _stem(name: str) -> str:
    stem = normal(name.strip()).removeprefix(PREFIX)
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", stem):
        raise FuseplugError(
            f"NAME is {name!r}; expected the name of a distribution, letters, digits and hyphens with a letter "
            "first: fuseplug new layernorm"
        )
    if PREFIX + stem in _OURS:
        raise FuseplugError(
            f"{PREFIX}{stem} is a distribution of Fuseplug's own; expected another name: fuseplug new my-{stem}"
            + (f" --op {stem.replace('-', '_')}" if stem.replace("-", "_") in KNOWN_OPS else "")
        )
    return stem.replace("-", "_")


def _params(params: str, op: str) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
    """The names of tensors, and the numbers with their values."""
    taken = _TAKEN_BY_TEMPLATES | {op: "the op has it"}
    tensors: list[str] = []
    numbers: list[tuple[str, float]] = []
    for item in params.split(",") if params.strip() else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        _check_identifier("--params", name, instance="weight,bias,eps=1e-5", taken=taken)
        taken[name] = "it is there twice"
        if equals:
            numbers.append((name, _number(name, value)))
        else:
            tensors.append(name)
    return tuple(tensors), tuple(numbers)


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise FuseplugError(f"--params has {name}={value}; expected a number: {name}=1e-5")
    return number


def _check_identifier(option: str, name: str, *, instance: str, taken: Mapping[str, str]) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise FuseplugError(
            f"{option} has the name {name!r}; expected a name in Python, in small letters: {option} {instance}"
        )
    if name in taken:
        raise FuseplugError(f"{option} has the name {name!r}, and {taken[name]}; expected another: {option} {instance}")
