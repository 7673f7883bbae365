"""``fuseplug bench``. Importing this module imports no torch."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from fuseplug.cli.options import Allow, AsJson, Include, TrustRemoteCode
from fuseplug.kernel_manager import KernelManager
from fuseplug.report.tables import console


def bench(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="qwen3-0.6b, qwen3-30b-a3b, llama-3-8b; or a config.json, a model's directory, or a Hub id. "
            "Weights are random.",
        ),
    ],
    layers: Annotated[int | None, typer.Option(help="How many layers the model is to have; by default all.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Where it runs: npu, cuda, cpu, … The default is the accelerator here, or cpu.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="bfloat16, float16 or float32. The default is bfloat16; float32 on a CPU that emulates it."),
    ] = None,
    tokens: Annotated[list[str] | None, typer.Option(help="Tokens of a call: 512, or 16,512. By default 512.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option(help="train, prefill or decode, or several: train,decode. By default train.")
    ] = None,
    vs: Annotated[
        list[str] | None,
        typer.Option(help="What else to time: compile, liger, again (eager twice, which shows the noise); or several."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Turns that count at the least.")] = 7,
    seconds: Annotated[
        float, typer.Option(help="For so long turns go on, for each mode and number of tokens: small work needs many.")
    ] = 5.0,
    ops: Annotated[bool, typer.Option("--ops", help="Time each kernel by itself, too.")] = False,
    include: Include = None,
    allow: Allow = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the kernels gain in a model on this machine; exit with 1 if the fused model is wrong."""
    numbers = [_number(text) for text in _items(tokens)]
    # Keeps torch's profiler from logging about itself; read when torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from .comparing import compare
    from .shown import show

    with console(stderr=True).status("importing torch and transformers") as status:

        def step(text: str | None) -> None:
            if text is None:
                status.stop()
            else:
                status.update(text)
                status.start()

        benchmark = compare(
            model,
            KernelManager(),
            layers=layers,
            device=device,
            dtype=dtype,
            tokens=numbers or (512,),
            modes=_items(mode) or ("train",),
            versus=[name for name in _items(vs) if name != "eager"],
            repeats=repeats,
            seconds=seconds,
            ops=ops,
            include=include or None,
            allow=allow or (),
            trust_remote_code=trust_remote_code,
            step=step,
        )
    if as_json:
        typer.echo(json.dumps(benchmark.to_dict(), indent=2, default=str))
    else:
        show(benchmark, console())
    if not benchmark.right:
        raise typer.Exit(1)


def _items(values: list[str] | None) -> list[str]:
    """The items in all *values* of an option; a value may have several, separated by commas."""
    return [item.strip() for value in values or () for item in value.split(",") if item.strip()]


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected numbers of tokens, as in --tokens 16,512; found {text!r}") from None
