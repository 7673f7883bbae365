"""Whose the calls are under autocast, in every model type that is fused: counted, without compiling programs.

    python -m survey.autocast [model types] [--jobs 2]

The survey counts the same with everything compiled, which takes some minutes a model. Who computes a call does not
depend on that: here PyTorch runs the functions of the programs. The counts go into the published records.
"""

from __future__ import annotations

from . import stand_in  # noqa: F401

# isort: split

import argparse
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from support.programs import by_pytorch

from fuseplug_backends.inductor import Program

from . import pool
from .build import build
from .checking import ALLOW, DTYPES, said
from .compiled import import_every_model
from .in_use import raised_under_autocast, under_autocast
from .kernel_kinds import COMPILED, KERNEL_KINDS
from .labels import all_calls
from .run import KEPT, Kept, model_types_compared, publish, published, survey


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all that were compared, unless some are named")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    release = transformers.__version__
    wanted = options.model_types or model_types_compared(release)
    records = survey(wanted, Kept(KEPT / release / "autocast"), works, options.jobs)
    publish(release, {"records": with_counts(published()[release]["records"], records)}, in_part=True)


def with_counts(records: Sequence[dict[str, Any]], counts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """*records*, and in those of the same model types what *counts* have counted."""
    by_type = {count["model_type"]: count["autocast"] for count in counts if count.get("autocast")}
    return [
        record | {DTYPES[0]: record[DTYPES[0]] | {"autocast": by_type[record["model_type"]]}}
        if record.get("model_type") in by_type
        else record
        for record in records
    ]


def works() -> pool.Work:
    """What counts in one model type, in a process of its own."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    manager = KERNEL_KINDS[COMPILED].manager()
    import_every_model()
    Program.__call__ = by_pytorch  # type: ignore[method-assign]

    def work(model_type: str) -> dict[str, Any]:
        try:
            model = build(model_type)
            entries = manager.plan(model, verify=False, allow=ALLOW).report.entries
            calls = all_calls(model, {entry.paths[0] for entry in entries})
            unfused = raised_under_autocast(model, calls)
            with manager.apply_all(model, allow=ALLOW, every_size=True) as applied:
                return {"status": "counted", "autocast": under_autocast(applied, model, calls, unfused)}
        except Exception as error:
            return {"status": "died", "why": said(error)}

    return work


if __name__ == "__main__":
    main()
