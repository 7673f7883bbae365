"""Times whole layers: prefill, and a training step.

The layers have no head and no loss, because these concern no kernel here. The training step is forward, backward and
AdamW with a learning rate of 0, so that all contenders can share their weights. Prefill keeps no cache. The host's time
counts.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ..contest.aims import LAYERS
from ..contest.problems import ROUNDINGS, Kind, LeftOut, normal
from ..contest.race import Clock, Out, Result, results, why_not
from ..contest.turns import Turn
from .budget import Budget
from .models import CONTENDERS, Blocks, Run, eager, shared

PREFILL, TRAINING = "prefill", "training step"

_SECONDS = 3.0


def end_to_end(blocks: Blocks, kind: Kind, clock: Clock, budget: Budget) -> tuple[list[Result], list[Out]]:
    """Time the contenders that compute the right hidden states and gradients."""
    torch.manual_seed(0)
    torch.compiler.reset()
    bench = _Bench(blocks, kind)
    runs: dict[str, Run] = {}
    out: list[Out] = []
    for name, make in CONTENDERS.items():
        try:
            if budget.over:
                raise LeftOut("out of time")
            run = make(shared(bench.model))
            fault = bench.fault(run)
        except Exception as error:  # a peer may raise anything
            out.append(why_not(blocks.name, bench.shape, name, error))
        else:
            if fault:
                out.append(Out(blocks.name, bench.shape, name, f"wrong: {fault}", fault=True))
            else:
                runs[name] = run
    timed: list[Result] = []
    for work, step in ((PREFILL, bench.prefill), (TRAINING, bench.train)):
        turns = {name: Turn(lambda: None, lambda _, run=run, step=step: step(run)) for name, run in runs.items()}
        timed += results(blocks.name, bench.shape, work, clock(turns, _SECONDS), aim=LAYERS)
    return timed, out


class _Bench:
    """A model, its inputs, and its true results, computed in a wider dtype."""

    def __init__(self, blocks: Blocks, kind: Kind) -> None:
        self.shape = f"{blocks.config['num_hidden_layers']} layers, {blocks.batch} × {blocks.sequence} tokens"
        self.model = blocks.make(kind)
        self._ids = torch.randint(blocks.config["vocab_size"], (blocks.batch, blocks.sequence), device=kind.device)
        self._upstream = normal(kind, blocks.batch, blocks.sequence, blocks.config["hidden_size"])
        self._adamw = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
        finer = torch.float32 if kind.dtype is torch.bfloat16 else torch.float64
        wide = copy.deepcopy(self.model).to(finer)
        wide.set_experts_implementation("eager")  # grouped_mm does not support float64
        self._truth = _outcome(eager(wide), wide, self._ids, self._upstream.to(finer))
        del wide
        self._allowed = {
            name: max(2 * error, ROUNDINGS * torch.finfo(kind.dtype).eps)
            for name, error in self._errors(eager(self.model)).items()
        }

    def prefill(self, run: Run) -> Tensor:
        with torch.no_grad():
            return run(self._ids)

    def train(self, run: Run) -> None:
        run(self._ids).backward(self._upstream.clone())  # a clone, because Liger-Kernel overwrites the gradient
        self._adamw.step()
        self._adamw.zero_grad()

    def fault(self, run: Run) -> str:
        """The first result further from the truth than twice eager's error, and than `ROUNDINGS`; ``""`` if none is."""
        for name, error in self._errors(run).items():
            if not error <= self._allowed[name]:
                return f"{name} is {error:.2g} off, {self._allowed[name]:.2g} allowed"
        return ""

    def _errors(self, run: Run) -> dict[str, float]:
        """Relative errors, as root mean squares: a token near the border between two experts may go to either."""
        found = _outcome(run, self.model, self._ids, self._upstream.clone())
        return {name: float((found[name] - true).norm() / true.norm()) for name, true in self._truth.items()}


def _outcome(run: Run, model: nn.Module, ids: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """The hidden states and the gradients of all parameters."""
    out = run(ids)
    out.backward(upstream)
    found = {"the result": out.detach()}
    for name, parameter in model.named_parameters():
        found[f"the gradient of {name}"], parameter.grad = parameter.grad, None
    return found
