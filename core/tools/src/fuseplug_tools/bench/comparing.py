"""Build, fuse, check and time a model: the steps of ``fuseplug bench``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fuseplug.devices import device_here
from fuseplug.errors import PlanError

from ..measuring.calls import sharing
from ..measuring.turns import by_turns, spread
from .check import Distance, distances
from .contenders import EAGER, FUSED, OTHERS, Contender, eager_of, fused_of
from .dtypes import emulates_bfloat16
from .memory import peak_memory
from .models import build_random, layers_of
from .ops import OpRow, measure_ops
from .shares import Share, shares
from .this_machine import machine
from .work import MODES, cannot_work, tokens_for

if TYPE_CHECKING:
    from fuseplug.contract import Mode
    from fuseplug.kernel_manager import KernelManager
    from fuseplug.report import Report

CONTENDERS = tuple(OTHERS)
"""The contenders that can be compared with eager and Fuseplug."""

_MOST_TURNS = 1000

_DECODED = 8
"""Tokens that a contender decodes in its turn."""

_CHECKED = 256
"""The most tokens on which results are compared, because the model runs in a wider dtype for that."""


@dataclass(frozen=True)
class ContenderRow:
    """The time of one contender at one kind of work.

    Attributes:
        mode: One of `MODES`.
        tokens: How many tokens a call has; for decoding, how many come before the decoded token.
        contender: The name of the contender.
        ms: Median and quartiles in milliseconds, as `spread` gives them.
        gain: How many times as fast as eager the contender is: the median of the ratios of all turns.
        peak: The peak memory of a call in bytes, above the weights; ``None`` if unknown.
    """

    mode: str
    tokens: int
    contender: str
    ms: dict[str, float]
    gain: float
    peak: float | None


@dataclass
class Benchmark:
    """The results of `compare`.

    Attributes:
        model: What was measured, in words.
        report: What was fused.
        checked: How near the results are to the true ones.
        rows: The times.
        shares: Where the time goes, by mode and number of tokens.
        ops: The times of each kernel by itself, by mode and number of tokens; empty if nobody asked for them.
        once: The seconds that were paid once, by contender.
        unused: The number of fused targets whose calls all went to the original.
        machine: The machine on which all this was measured.
    """

    model: str
    report: Report
    checked: list[Distance] = field(default_factory=list)
    rows: list[ContenderRow] = field(default_factory=list)
    shares: dict[tuple[str, int], list[Share]] = field(default_factory=dict)
    ops: dict[tuple[str, int], list[OpRow]] = field(default_factory=dict)
    once: dict[str, float] = field(default_factory=dict)
    unused: int = 0
    machine: dict[str, Any] = field(default_factory=machine)

    @property
    def right(self) -> bool:
        """Whether all results of the fused model are as near to the true ones as they must be."""
        return all(distance.right for distance in self.checked)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "model": self.model,
            "machine": self.machine,
            "right": self.right,
            "checked": [distance._asdict() for distance in self.checked],
            "paid once, s": self.once,
            "unused": self.unused,
            "rows": [asdict(row) for row in self.rows],
            "shares": [
                {"mode": mode, "tokens": tokens, "operations": [share._asdict() for share in shares]}
                for (mode, tokens), shares in self.shares.items()
            ],
            "ops": [
                {"mode": mode, "tokens": tokens, "kernels": [asdict(row) for row in rows]}
                for (mode, tokens), rows in self.ops.items()
            ],
            "report": self.report.to_dict(),
        }


def compare(
    name: str,
    manager: KernelManager,
    *,
    layers: int | None = None,
    device: str | None = None,
    dtype: str | None = None,
    tokens: Sequence[int] = (512,),
    modes: Sequence[str] = ("train",),
    versus: Sequence[str] = (),
    repeats: int = 7,
    seconds: float = 5.0,
    ops: bool = False,
    allow: Sequence[str] = (),
    include: Sequence[str] | None = None,
    trust_remote_code: bool = False,
    step: Callable[[str | None], Any] = lambda _: None,
) -> Benchmark:
    """Measure what the kernels of *manager* gain in the model *name*.

    Args:
        name: A short name (`fuseplug_tools.bench.models.SHORT_NAMES`), or as for ``fuseplug plan``.
        manager: The manager whose kernels are applied.
        layers: How many layers the model is to have; ``None`` for all.
        device: Where it runs; by default on the accelerator, if there is one.
        dtype: The dtype of its weights: ``"bfloat16"``, ``"float16"`` or ``"float32"``. By default
            ``"bfloat16"``, or ``"float32"`` on a CPU that emulates bfloat16.
        tokens: How many tokens a call has; each number is measured.
        modes: Names from `MODES`; each is measured.
        versus: Names from `CONTENDERS`, to be timed besides eager and Fuseplug.
        repeats: How many turns count at least; two or more.
        seconds: For how long turns go on, for each kind of work and number of tokens; at most a thousand turns.
        ops: Whether to time each kernel by itself, too, in the calls that this model makes.
        allow: As for ``apply_all``.
        include: As for ``apply_all``.
        trust_remote_code: Whether Python code that comes with the model may be run.
        step: Called with the next step in words, or with ``None`` if that step shows its progress itself.

    Raises:
        PlanError: If an argument is wrong, or a contender cannot run here.
        FuseplugError: As for ``apply_all``.
    """
    _check(dtype, tokens, modes, versus, repeats)
    device = device_here(device)
    if dtype is None:
        dtype = "float32" if torch.device(device).type == "cpu" and emulates_bfloat16() else "bfloat16"
    step("building the model")
    model = build_random(
        name, layers=layers, dtype=getattr(torch, dtype), device=device, trust_remote_code=trust_remote_code
    )
    if why := cannot_work(model):
        raise PlanError(f"{name} is a {type(model).__name__}, {why}; expected a language model that generates text")
    training = "train" in modes
    mode_of: Mode = "training" if training else "inference"
    step(None)
    fused, applied = fused_of(model, manager, mode_of, allow, include)
    benchmark = Benchmark(_description(name, model, dtype, device), applied.report)
    step("comparing results with those of a wider dtype")
    ids = tokens_for(model, min(_CHECKED, max(tokens)))
    every = sharing(model)
    # Checks calls that are too small to gain, too. Each kernel was verified just now.
    every_size = manager.apply_all(every, mode=mode_of, allow=allow, include=include, verify=False, every_size=True)
    benchmark.checked = distances(model, every, ids, gradients=training)
    contenders = [eager_of(model), fused, *(OTHERS[other](model) for other in versus)]
    benchmark.once = {contender.name: contender.seconds for contender in contenders if contender.seconds}
    for mode in modes:
        for count in tokens:
            _measure(benchmark, contenders, mode, count, repeats=repeats, seconds=seconds, step=step)
            if ops:
                step(f"{mode}, {count} tokens: each kernel by itself")
                run = partial(_once, mode, tokens_for(model, count))
                benchmark.ops[mode, count] = measure_ops(model, applied, every_size, run, repeats)
    benchmark.unused = sum(not calls.fused for calls in applied.calls())
    return benchmark


def _check(dtype: str | None, tokens: Sequence[int], modes: Sequence[str], versus: Sequence[str], repeats: int) -> None:
    for what, names, allowed in (
        ("dtype", [dtype] if dtype else [], ("bfloat16", "float16", "float32")),
        ("mode", modes, tuple(MODES)),
        ("contender", versus, CONTENDERS),
    ):
        for name in names:
            if name not in allowed:
                raise PlanError(f"{name!r} is no {what} of a benchmark; expected one of {', '.join(allowed)}")
    if not tokens or min(tokens) < 2:
        raise PlanError(f"tokens are {list(tokens)}; expected numbers from 2 on")
    if repeats < 2:
        raise PlanError(f"repeats is {repeats}; expected at least 2, for there to be a spread")


def _measure(
    benchmark: Benchmark,
    contenders: Sequence[Contender],
    mode: str,
    tokens: int,
    *,
    repeats: int,
    seconds: float,
    step: Callable[[str | None], Any],
) -> None:
    step(f"{mode}, {tokens} tokens: the first calls, in which compilers work")
    ids = tokens_for(contenders[0].model, tokens)
    runs = {contender.name: MODES[mode](contender.model, ids) for contender in contenders}

    # A model decodes one token right after another, so its code is in the processor's caches, not another contender's.
    samples = by_turns(
        runs,
        max(repeats, _MOST_TURNS),
        warm_up=1,
        at_a_time=_DECODED if mode == "decode" else 1,
        after_turn=lambda done: step(f"{mode}, {tokens} tokens: {done} turns"),
        within=seconds,
        least=repeats,
    )
    for name, times in samples.items():
        ratios = [eager / other for eager, other in zip(samples[EAGER], times, strict=True)]
        peak = peak_memory(runs[name], ids.device.type)
        ms = spread([microseconds / 1e3 for microseconds in times])
        benchmark.rows.append(ContenderRow(mode, tokens, name, ms, gain=statistics.median(ratios), peak=peak))
    step(f"{mode}, {tokens} tokens: profiling")
    benchmark.shares[mode, tokens] = shares(runs[EAGER], runs[FUSED], ids.device.type)


def _once(mode: str, ids: torch.Tensor, model: torch.nn.Module) -> None:
    MODES[mode](model, ids)()


def _description(name: str, model: torch.nn.Module, dtype: str, device: str) -> str:
    count = sum(parameter.numel() for parameter in model.parameters())
    layers = layers_of(model)
    of_layers = "" if layers is None else f", {layers} layer{'s' * (layers != 1)}"
    return f"{name} ({type(model).__name__}{of_layers}, {count / 1e6:,.0f} million parameters), {dtype}, {device}"
