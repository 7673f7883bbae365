"""RMSNorm: ours against the eager module, torch's own rms_norm and torch.compile of the module.

Run by hand: ``python tests/benchmarks/rmsnorm.py [--json FILE] [--threads N]``. Every contender does the same work on
the same inputs and is first checked for being right; they are timed by turns, so that a busy moment meets them all.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from fuseplug_rmsnorm.inductor import rms_norm
from fuseplug_rmsnorm.reference import rms_norm as reference
from fuseplug_rmsnorm.sites import NormAdapter

HIDDEN = 2048
OURS, EAGER = "fuseplug", "eager module"


def contenders(dtype):
    eager, fused, compiled = (LlamaRMSNorm(HIDDEN).to(dtype) for _ in range(3))
    fused.forward = NormAdapter("llama", "weight", "variance_epsilon").bind(rms_norm).__get__(fused)
    compiled = torch.compile(compiled, dynamic=True)
    weight = eager.weight
    for module in (fused, compiled):
        module.weight = weight
    return {
        OURS: fused,
        EAGER: eager,
        "F.rms_norm": lambda x: functional.rms_norm(x, (HIDDEN,), weight, 1e-6),
        "torch.compile": compiled,
    }, weight


def forward(function, x, weight, grad):
    with torch.no_grad():
        return (function(x),)


def forward_backward(function, x, weight, grad):
    out = function(x)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), grad))


def assert_right(functions, work, x, weight, grad):
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    truth = work(lambda x: reference(x, wide[1], 1e-6), *wide, grad.double())
    for name, function in functions.items():
        for found, exact in zip(work(function, x, weight, grad), truth, strict=True):
            error = (found.double() - exact).abs().amax() / exact.abs().amax()
            limit = 32 * torch.finfo(x.dtype).eps
            assert error <= limit, f"{name} is {error:.1e} off, allowed {limit:.1e}"


def timed(functions, work, arguments, repeats):
    # A call of microseconds is timed many at a time, or the clock is what is measured.
    inner = max(1, min(50, 2**21 // arguments[0].numel()))
    samples = {name: [] for name in functions}
    for turn in range(repeats + 5):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(inner):
                work(function, *arguments)
            if turn >= 5:
                samples[name].append((time.perf_counter() - start) / inner * 1e6)
    return samples


def machine():
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def measure(repeats):
    for dtype in (torch.bfloat16, torch.float32):
        functions, weight = contenders(dtype)
        for rows in (1, 16, 128, 2048):
            x = torch.randn(rows, HIDDEN).to(dtype).requires_grad_()
            grad = torch.randn(rows, HIDDEN).to(dtype)
            for work in (forward, forward_backward):
                assert_right(functions, work, x, weight, grad)
                samples = timed(functions, work, (x, weight, grad), repeats)
                for name, microseconds in samples.items():
                    low, median, high = statistics.quantiles(microseconds, n=4)
                    yield {
                        "dtype": str(dtype).removeprefix("torch."),
                        "rows": rows,
                        "work": work.__name__,
                        "contender": name,
                        "median_us": round(median, 1),
                        "iqr_us": round(high - low, 1),
                        "speedup_over_eager": round(statistics.median(samples[EAGER]) / median, 2),
                    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("rmsnorm-benchmark.json"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    results = []
    print(f"{'dtype':9} {'rows':>5} {'work':17} {'contender':14} {'median µs':>10} {'IQR':>8} {'× eager':>8}")
    for row in measure(options.repeats):
        results.append(row)
        print(
            "{dtype:9} {rows:5} {work:17} {contender:14} {median_us:10} {iqr_us:8} {speedup_over_eager:8}".format(**row)
        )
    options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
