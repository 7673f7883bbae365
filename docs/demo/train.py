"""Train a small mixture of experts on a book, unfused and fused, from the same seed on the same batches, and compare.

The losses should agree, and the fused steps should be faster. After ``undo()``, the model should compute the same bits
as a model that was never fused; this is checked, and the exit status is 1 if it is not so.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import data
import machine
import torch
import vocabulary
from model import build, write
from outcome import Outcome, print_losses, print_summary
from promises import BrokenPromiseError, apply, check_round_trip, check_undo
from timing import Race, race
from training import train

from fuseplug_tools.bench import emulates_bfloat16

PROMPT = '"Well," said Tom, '


def main() -> None:
    args = parse_args()
    start = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    outcome = compare(args)
    print_summary(outcome)
    picture, of_loss, numbers = outcome.save(args.out, vars(args))
    print(f"  Pictures: {picture}, {of_loss}   numbers: {numbers}   took {time.perf_counter() - start:.0f} s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=96, help="training steps of each run")
    parser.add_argument("--batch", type=int, default=8, help="windows of text in a batch")
    parser.add_argument("--length", type=int, default=256, help="bytes in a window")
    parser.add_argument("--rounds", type=int, default=24, help="turns of each model when speed is measured")
    parser.add_argument("--write", type=int, default=140, help="bytes to write with the trained model")
    parser.add_argument("--seed", type=int, default=0, help="decides the weights, the batches and what is written")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="where picture and numbers go")
    return parser.parse_args()


def compare(args: argparse.Namespace) -> Outcome:
    text = data.load()
    batches = data.batches(text.training, args.steps, batch=args.batch, length=args.length, seed=args.seed)
    unseen = data.batches(text.held_out, 8, batch=args.batch, length=args.length, seed=args.seed)
    print(f"Text:    {data.TITLE}, public domain")
    print(f"Machine: {machine.line()}")

    model = build(args.seed)
    millions = model.num_parameters() / 1e6
    print(f"Model:   a Qwen3-MoE of {millions:.1f} million parameters, random, one byte a token, float32")
    print(f"\n1. Train it unfused: {args.steps} steps of {args.batch} × {args.length} bytes")
    unfused = train(model, batches, unseen, "unfused")

    print("\n2. Build it again from the same seed, and fuse it: manager.apply_all(model)", flush=True)
    model = build(args.seed)
    report, apply_seconds = check_round_trip(model, unseen[0])
    print(f"\n{report}")
    applied, _ = apply(model)

    print("\n3. Train it fused, on the same batches")
    fused = train(model, batches, unseen, "fused")
    print_losses(unfused, fused, every=args.steps // 8)

    print("\n4. Let it write", flush=True)
    written = write(model, PROMPT, length=args.write, seed=args.seed)
    print("\n".join(f"  | {line}" for line in written.splitlines()))

    print("\n5. applied.undo()")
    logits_difference = check_undo(model, applied, unseen[0], args.seed)
    print("  The logits are bitwise those of a model never fused. So they were before training.")

    print("\n6. Measure: an unfused and a fused model take turns, so that what disturbs one disturbs both")
    dtypes = [torch.float32] if emulates_bfloat16() else [torch.float32, torch.bfloat16]
    if torch.bfloat16 not in dtypes:
        print("  bfloat16 is left out: this CPU has no instructions for it, and one step would take minutes")
    races = [r for dtype in dtypes for r in _race(args, dtype, batches[0])]

    print('\n7. The loss with a real vocabulary: manager.apply_all(model, allow=["lazy_logits"])', flush=True)
    loss = vocabulary.compare(args.seed, dtypes[-1])
    vocabulary.print_losses(loss)
    return Outcome(unfused, fused, apply_seconds, logits_difference, written, races, loss)


def _race(args: argparse.Namespace, dtype: torch.dtype, tokens: torch.Tensor) -> list[Race]:
    fused = build(args.seed, dtype)
    applied, _ = apply(fused)
    with applied:
        return race(build(args.seed, dtype), fused, tokens, args.rounds)


if __name__ == "__main__":
    try:
        main()
    except BrokenPromiseError as error:
        sys.exit(f"FAILED: {error}")
