"""The results of the demo: as text, as JSON and as pictures."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import machine
import plot
from timing import Race, Spread

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from training import Run
    from vocabulary import Losses


@dataclass(frozen=True)
class Outcome:
    """All results of the demo."""

    unfused: Run
    fused: Run
    apply_seconds: float
    logits_difference: float
    """The largest difference between the fused model's logits and those after ``undo()``."""
    written: str
    races: Sequence[Race]
    loss: Losses

    @property
    def differences(self) -> list[float]:
        return [abs(u - f) for u, f in zip(self.unfused.losses, self.fused.losses, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        return {
            "machine": machine.facts(),
            "losses": {"unfused": self.unfused.losses, "fused": self.fused.losses},
            "largest_loss_difference": max(self.differences),
            "held_out_loss": {"unfused": self.unfused.held_out, "fused": self.fused.held_out},
            "apply_seconds": self.apply_seconds,
            "step_seconds": {"unfused": self.unfused.seconds, "fused": self.fused.seconds},
            "logits_difference_before_undo": self.logits_difference,
            "undo_is_exact": True,
            "written": self.written,
            "races": [race.to_dict() for race in self.races],
            "loss": self.loss.to_dict(),
        }

    def save(self, folder: Path, arguments: Mapping[str, Any]) -> tuple[Path, Path, Path]:
        """Write the pictures and the numbers; return their paths."""
        picture, of_loss, numbers = folder / "demo.png", folder / "demo-loss.png", folder / "demo.json"
        plot.draw(self.unfused, self.fused, self.races, picture)
        plot.draw_loss(self.loss, of_loss)
        numbers.write_text(json.dumps({"arguments": arguments} | self.to_dict(), indent=1, default=str) + "\n")
        return picture, of_loss, numbers


def print_losses(unfused: Run, fused: Run, every: int) -> None:
    print(f"\n  {'step':>5} {'unfused':>10} {'fused':>10} {'difference':>11}")
    last = len(unfused.losses) - 1
    for i in sorted({*range(0, last, max(1, every)), last}):
        difference = abs(unfused.losses[i] - fused.losses[i])
        print(f"  {i:>5} {unfused.losses[i]:>10.5f} {fused.losses[i]:>10.5f} {difference:>11.1e}")


def print_summary(outcome: Outcome) -> None:
    unfused, fused = outcome.unfused, outcome.fused
    print("\nSummary")
    print(f"  loss while training    {unfused.losses[0]:.2f} → {unfused.losses[-1]:.5f} unfused")
    print(f"                         {fused.losses[0]:.2f} → {fused.losses[-1]:.5f} fused")
    print(f"                         at most {max(outcome.differences):.1e} apart in {len(fused.losses)} steps")
    print(f"  loss on unseen text    {unfused.held_out:.5f} unfused, {fused.held_out:.5f} fused")
    print(f"  undo()                 exact to the bit (fused, logits were up to {outcome.logits_difference:.1e} away)")
    warm = statistics.median(fused.seconds)
    print(
        f"  paid once              apply_all {outcome.apply_seconds:.1f} s, its checks included; "
        f"first fused step {fused.seconds[0] - warm:+.1f} s"
    )
    print(f"\n  {'thousand tokens/s':<26} {'unfused':<20} {'fused':<20} speed-up     median (quartiles)")
    for race in outcome.races:
        rates = [Spread.of([race.tokens / 1e3 / s for s in seconds]) for seconds in (race.unfused, race.fused)]
        print(f"  {race.name + ', ' + race.dtype:<26} {rates[0]!s:<20} {rates[1]!s:<20} ×{race.speed_up}")
