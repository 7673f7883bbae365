"""Counts the model types that Liger-Kernel's kernels fit, as planned for a GPU, and the reasons why kernels decline.

    python -m survey.liger [model types]

Nothing is run on a device: each module is examined on the CPU, and the kernels' own checks are pending. Each record is
kept as soon as it is made, so a run that was stopped resumes where it was. Writes docs/liger.json from all records that
were made with this code.
"""

from __future__ import annotations

from . import stand_in  # noqa: F401

# isort: split

import json
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch
import transformers
from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

from fuseplug import KernelManager
from fuseplug_liger import KERNELS

from .build import NoModel, build
from .checking import ALLOW, said
from .run import KEPT, ROOT, Kept, model_types

RESULT = ROOT / "docs" / "liger.json"


def record_of(model_type: str) -> dict[str, Any]:
    """The plan for *model_type*: how many targets of each op are fused, and how many are declined for each reason."""
    record: dict[str, Any] = {"model_type": model_type}
    try:
        model = build(model_type)
    except NoModel:
        return record | {"status": "no model"}
    except Exception as error:
        return record | {"status": "not built", "why": said(error)}
    try:
        report = KernelManager(environ={}).plan(model, device="cuda", include=KERNELS, allow=ALLOW).report
    except Exception as error:
        return record | {"status": "not planned", "why": said(error)}
    fused: Counter[str] = Counter(entry.op for entry in report.fused)
    declined: dict[str, Counter[str]] = defaultdict(Counter)
    for entry in report.left_alone:
        if not entry.covered_by:
            declined[entry.op][entry.why_not] += 1
    return record | {"status": "planned", "fused": fused, "declined": declined}


def summary(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The totals of *records*: of model types, and for each op, of targets and of reasons for declines."""
    planned = [record for record in records if record["status"] == "planned"]
    of_op = {}
    for op in sorted({op for record in planned for op in (*record["fused"], *record["declined"])}):
        reasons: dict[str, set[str]] = defaultdict(set)
        for record in planned:
            for why in record["declined"].get(op, {}):
                reasons[of_liger(why)].add(record["model_type"])
        of_op[op] = {
            "model types fused": sum(op in record["fused"] for record in planned),
            "targets fused": sum(record["fused"].get(op, 0) for record in planned),
            "model types with a decline": sum(op in record["declined"] for record in planned),
            "reasons": {why: len(types) for why, types in sorted(reasons.items(), key=lambda item: -len(item[1]))},
        }
    fused = {record["model_type"] for record in planned if record["fused"]}
    listed = {name for name in MODEL_TYPE_TO_APPLY_LIGER_FN if name in transformers.CONFIG_MAPPING}
    return {
        "versions": {name: version(name) for name in ("liger-kernel", "transformers", "torch")},
        "model types": {
            "of transformers": len(model_types()),
            "planned": len(planned),
            "with a kernel of Liger's": len(fused),
            "in Liger's own list": len(MODEL_TYPE_TO_APPLY_LIGER_FN),
            "in its list, planned, without a kernel here": sorted(
                name for name in listed - fused if name in {record["model_type"] for record in planned}
            ),
        },
        "ops": of_op,
    }


def of_liger(why: str) -> str:
    """What Liger does not compute, without the name of the variant; or that the module is not recognised at all."""
    _, _, reason = why.partition(": it computes ")
    return reason.partition(": ")[2] or "not recognised, so that no kernel of any backend is proposed"


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    kept = Kept(KEPT / transformers.__version__ / "liger planned")
    for model_type in sys.argv[1:] or model_types():
        if kept.get(model_type) is None:
            kept.put(model_type, record_of(model_type))
    records = [record for model_type in model_types() if (record := kept.get(model_type)) is not None]
    RESULT.write_text(json.dumps(summary(records), indent=1) + "\n")


if __name__ == "__main__":
    main()
