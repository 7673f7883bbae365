"""Verify and time Fuseplug's kernels on an Ascend NPU, in one go, and write a result file to send.

    pip install "fuseplug[testing,transformers]" fuseplug-{rmsnorm,swiglu,rope,moe} accelerate
    python verify_on_npu.py

The script has three independent parts. The first runs every kernel through the conformance kit. The second checks every
op at the shapes of real layers, then times it against the plain PyTorch that it replaces. The third builds models of
real layer sizes with random weights. With each kernel alone and with all kernels, it checks and times these models
against the same models unfused.

Nothing is downloaded. The script writes failures down and continues. The exit status is 1 if anything failed.

``--quick`` does all this at toy sizes; the times then mean nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseplug import KernelManager
from fuseplug_testing import ConformanceError, check_kernel
from fuseplug_tools.doctor import examine, look

PARTS = ("conformance", "ops", "models")
KINDS = ("npu_fused_rmsnorm", "npu_fused_swiglu", "npu_fused_rope", "npu_fused_moe")
ROUNDINGS = {torch.bfloat16: 8, torch.float32: 64}
"""The error that a result may have beyond twice that of plain PyTorch, in roundings of its dtype."""


class Case(NamedTuple):
    """The arguments of one op: the tensors to differentiate by, and all others."""

    name: str
    inputs: dict[str, Tensor]
    others: dict[str, Any]


def main() -> None:
    args = parse_args()
    manager = KernelManager()
    if not torch.npu.is_available():
        sys.exit("no NPU is available to torch; `fuseplug doctor` says what is missing")
    result: dict[str, Any] = {"machine": machine(manager), "quick": args.quick, "failures": []}
    parts: dict[str, Callable[[], Any]] = {
        "conformance": lambda: conformance(manager, args),
        "ops": lambda: list(ops(manager, args)),
        "models": lambda: list(models(manager, args)),
    }
    for name, part in parts.items():
        if name not in args.parts:
            continue
        print(f"\n{name}", flush=True)
        result[name] = guarded(part, name, result["failures"])
    for row in [row for name in args.parts for row in result[name] or []]:
        if row["wrong"]:
            result["failures"].append({"where": row["name"], "what": row["wrong"]})
    path = args.out or Path(f"fuseplug-{result['machine']['chip']}-{datetime.date.today()}.json".replace(" ", "-"))
    path.write_text(json.dumps(result, indent=1, default=str))
    print(f"\n{len(result['failures'])} failures. Please send {path} to the project, even if nothing failed.")
    sys.exit(1 if result["failures"] else 0)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="toy sizes: does everything run at all?")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to do")
    parser.add_argument("--repeats", type=int, default=30, help="turns of each contender")
    parser.add_argument("--out", type=Path, help="the result file")
    return parser.parse_args()


def machine(manager: KernelManager) -> dict[str, Any]:
    rows = examine(look(), manager.kernels())
    for row in rows:
        print(f"{row.state:5} {row.name}: {row.found} {row.remedy}".rstrip())
    return {
        "chip": torch.npu.get_device_name(0),
        "npus": torch.npu.device_count(),
        "cann": getattr(torch.version, "cann", None),
        "date": datetime.date.today().isoformat(),
        "doctor": [row._asdict() for row in rows],
    }


def guarded(part: Callable[[], Any], name: str, failures: list[Any]) -> Any:
    try:
        return part()
    except Exception as error:  # noqa: BLE001 - an unknown machine may fail in any way; the other parts may work
        print(f"  {name}: {type(error).__name__}: {error}")
        failures.append({"where": name, "what": traceback.format_exc()})
        return None


def kernels(manager: KernelManager) -> dict[str, Any]:
    found = {record.kernel_id: record.kernel for record in manager.kernels() if record.state == "ready"}
    return {name: found[name] for name in KINDS if name in found}


def conformance(manager: KernelManager, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for name, kernel in kernels(manager).items():
        start, checks = time.perf_counter(), ("numbers", "gradients") if args.quick else None
        try:
            found, wrong = check_kernel(kernel, device="npu", checks=checks), ""
        except ConformanceError as error:
            found, wrong = error.result, str(error)
        print(f"  {found}")
        seconds = time.perf_counter() - start
        rows.append({"name": name, "wrong": wrong, "right": dict(found.passed), "seconds": seconds})
    return rows


def ops(manager: KernelManager, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, kernel in kernels(manager).items():
        for dtype in (torch.bfloat16, torch.float32):
            for case in CASES[name](dtype, quick=args.quick):
                label = f"{name}, {case.name}, {str(dtype).removeprefix('torch.')}"
                fused, plain = (differentiated(compute, case) for compute in (kernel.load(), kernel.load_reference()))
                wrong = apart(fused(), plain(), true_gradients(kernel.load_reference(), case), dtype)
                timed = {} if wrong else by_turns({"fused": fused, "plain": plain}, args.repeats)
                print(f"  {label}: {wrong or speed(timed)}", flush=True)
                yield {"name": label, "wrong": wrong, "µs, forward and backward": timed}


def differentiated(compute: Callable[..., Any], case: Case) -> Callable[[], list[Tensor]]:
    """A function that runs one forward and backward, and returns the outputs and the gradient of each input."""
    inputs = {name: value.detach().to("npu").requires_grad_() for name, value in case.inputs.items()}
    others = {name: value.to("npu") if isinstance(value, Tensor) else value for name, value in case.others.items()}
    return lambda: gradients(compute, inputs, others)


def true_gradients(reference: Callable[..., Any], case: Case) -> list[Tensor]:
    inputs = {name: value.detach().double().requires_grad_() for name, value in case.inputs.items()}
    others = {
        name: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for name, v in case.others.items()
    }
    return gradients(reference, inputs, others)


def gradients(compute: Callable[..., Any], inputs: dict[str, Tensor], others: dict[str, Any]) -> list[Tensor]:
    found = compute(**inputs, **others)
    outputs = [found] if isinstance(found, Tensor) else [each for each in found if each is not None]
    return [*outputs, *torch.autograd.grad(outputs, list(inputs.values()), [each.detach() for each in outputs])]


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale).to(dtype)


def norms(dtype: torch.dtype, *, quick: bool) -> Iterator[Case]:
    for tokens, hidden in [(6, 64)] if quick else [(4096, 4096), (1, 4096), (131072, 128)]:
        inputs = {"x": normal(tokens, hidden, dtype=dtype), "weight": normal(hidden, dtype=dtype)}
        yield Case(f"{tokens} × {hidden}", inputs, {"eps": 1e-6})


def gates(dtype: torch.dtype, *, quick: bool) -> Iterator[Case]:
    for tokens, width in [(6, 64)] if quick else [(4096, 11008), (1, 11008)]:
        parts = {"gate": normal(tokens, width, dtype=dtype), "up": normal(tokens, width, dtype=dtype)}
        yield Case(f"{tokens} × {width} apart", parts, {})
        yield Case(f"{tokens} × {width} in one", {"gate": normal(tokens, 2 * width, dtype=dtype)}, {})


def rotations(dtype: torch.dtype, *, quick: bool) -> Iterator[Case]:
    for batch, heads, tokens in [(2, 4, 6)] if quick else [(1, 32, 4096), (8, 32, 1)]:
        angles = torch.arange(tokens)[None, None, :, None] / 10000 ** (torch.arange(128) % 64 / 64)
        tables = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
        shapes = {"q": (batch, tokens, heads, 128), "k": (batch, tokens, heads // 4, 128)}
        inputs = {name: normal(*shape, dtype=dtype).transpose(1, 2) for name, shape in shapes.items()}
        yield Case(f"{batch} × {heads} × {tokens} × 128", inputs, tables)


def experts(dtype: torch.dtype, *, quick: bool) -> Iterator[Case]:
    sizes = [(16, 4, 2, 64, 32)] if quick else [(4096, 128, 8, 2048, 768), (4096, 8, 2, 4096, 14336)]
    for tokens, number, k, hidden, inner in sizes:
        scores = normal(tokens, number, dtype=torch.float32).softmax(-1)
        weights, index = scores.topk(k)
        inputs = {
            "x": normal(tokens, hidden, dtype=dtype),
            "top_k_weights": weights.to(dtype),
            "gate_up": normal(number, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5),
            "down": normal(number, hidden, inner, dtype=dtype, scale=inner**-0.5),
        }
        yield Case(f"{tokens} tokens to {k} of {number}, {hidden} × {inner}", inputs, {"top_k_index": index})


CASES = dict(zip(KINDS, (norms, gates, rotations, experts), strict=True))


def models(manager: KernelManager, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for name, build in MODELS.items():
        # Among many experts, a rounding may send a token to another expert, unfused as well as fused. The results of
        # such a model say nothing about a kernel. The toy sends every token to every expert.
        comparable = args.quick or build is not qwen3_moe
        for dtype in (torch.bfloat16,) if args.quick else (torch.bfloat16, torch.float32):
            model = build(quick=args.quick).to("npu", dtype)
            tokens = torch.arange(32 if args.quick else 4096, device="npu").view(2, -1) % 500
            before = parity_step(model, tokens)
            true = [each.double() for each in parity_step(model.float(), tokens)]
            model.to(dtype)
            for chosen in [[each] for each in kernels(manager)] + [list(kernels(manager))]:
                label = f"{name}, {str(dtype).removeprefix('torch.')}, {' + '.join(chosen)}"
                if not manager.plan(model, include=chosen, verify=False).report.fused:
                    continue
                with manager.apply_all(model, include=chosen) as applied:
                    fused = parity_step(model, tokens)
                    wrong = apart(fused, before, true, dtype) if comparable else ""
                    seconds = spread(timed_step(model, tokens, args.repeats))
                timed = {"fused": seconds, "plain": spread(timed_step(model, tokens, args.repeats))}
                print(f"  {label}: {wrong or speed(timed)}", flush=True)
                yield {"name": label, "wrong": wrong, "µs, a step": timed, "report": applied.report.to_dict()}


def qwen3(*, quick: bool) -> nn.Module:
    """Two layers of Qwen3-8B."""
    import transformers

    sizes = dict(TOY) if quick else {"hidden_size": 4096, "intermediate_size": 12288, "head_dim": 128}
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LAYERS | sizes))


def qwen3_moe(*, quick: bool) -> nn.Module:
    """Two layers of Qwen3-30B-A3B."""
    import transformers

    toy = TOY | {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 4}
    sizes = toy if quick else {"hidden_size": 2048, "moe_intermediate_size": 768, "head_dim": 128, "num_experts": 128}
    torch.manual_seed(0)
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**LAYERS | sizes))


LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 512}
TOY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
MODELS = {"Qwen3-8B, 2 layers": qwen3, "Qwen3-30B-A3B, 2 layers": qwen3_moe}


def parity_step(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    out = model(input_ids=tokens, labels=tokens, use_cache=False)
    out.loss.backward()
    return [out.logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def timed_step(model: nn.Module, tokens: Tensor, repeats: int) -> Iterator[float]:
    for turn in range(-2, max(4, repeats // 3)):
        start = now()
        parity_step(model, tokens)
        if turn >= 0:
            yield now() - start


def apart(found: list[Tensor], plain: list[Tensor], true: list[Tensor], dtype: torch.dtype) -> str:
    """Describe the first of *found* whose error exceeds twice that of *plain* plus some roundings; ``""`` if none."""
    if len(found) != len(plain):
        return f"{len(found)} results where there should be {len(plain)}: a gradient is missing"
    for number, (one, other, truth) in enumerate(zip(found, plain, true, strict=True)):
        allowed = 2 * distance(other, truth) + ROUNDINGS[dtype] * torch.finfo(dtype).eps
        if not (off := distance(one, truth)) <= allowed:
            return f"result {number} is {off:.2e} of its size from the truth, where {allowed:.2e} is allowed"
    return ""


def distance(found: Tensor, true: Tensor) -> float:
    found, true = found.cpu().double(), true.cpu().double()
    return ((found - true).norm() / true.norm().clamp_min(1e-30)).item()


def by_turns(contenders: dict[str, Callable[[], Any]], repeats: int) -> dict[str, dict[str, float]]:
    took: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-3, max(4, repeats)):
        for name, run in contenders.items():
            start = now()
            run()
            elapsed = now() - start
            if turn >= 0:
                took[name].append(elapsed)
    return {name: spread(values) for name, values in took.items()}


def now() -> float:
    """The time in µs, once the device has finished."""
    torch.npu.synchronize()
    return time.perf_counter() * 1e6


def spread(values: Any) -> dict[str, float]:
    values = list(values)
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": median, "quartile_1": low, "quartile_3": high, "n": len(values)}


def speed(timed: dict[str, dict[str, float]]) -> str:
    fused, plain = timed["fused"]["median"], timed["plain"]["median"]
    return f"right; {fused:.0f} µs, plain {plain:.0f} µs, × {plain / fused:.2f}"


if __name__ == "__main__":
    main()
