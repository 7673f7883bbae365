"""Surveys every model type of the installed transformers: what is fused, and whether it still computes the same.

    python -m survey.run [model types, or "class OP/FOLDER/NAME"] [--kernels npu] [--publish] [--plan-only]
        [--jobs 2] [--fresh] [--keep]

Inductor's kernels are asked about all model types and classes. Other kernels run the model types that were compared
with Inductor's. Model types that are named are recorded; with ``--publish``, their records replace the published ones.

With ``--plan-only``, no kernel is run and nothing is published. Every answer that differs from the published one is
printed, and the exit status is 1 if anything that was fused no longer is.

The record of each model type is kept as soon as it is made, so a run that was stopped resumes where it was. Records
that were made with other code are made again, unless ``--keep`` is given.
"""

from __future__ import annotations

from . import stand_in  # noqa: F401

# isort: split

import argparse
import dataclasses
import datetime
import functools
import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import rich.progress
import torch
import transformers
from packaging.version import Version

from fuseplug_tools.bench import machine

from . import pool, single_class
from .census import Census
from .changes import changes, fused_of_each_op
from .checking import DTYPES, ELSEWHERE, ROUNDINGS, TIMES, check, said
from .collect import Answer, answers, summary
from .compiled import import_every_model
from .kernel_kinds import COMPILED, KERNEL_KINDS
from .page import to_json, to_markdown

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".nox" / "coverage"
DOCS = ROOT / "docs"
LIMIT = 600.0
"""The most seconds that a model or class may take."""

CLASS = "class "
"""The prefix of a class's task; op, folder and name follow."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_types", nargs="*", help="all, unless some are named")
    parser.add_argument("--kernels", choices=KERNEL_KINDS, default=COMPILED, help="whose kernels to survey")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true", help="forget what was recorded")
    parser.add_argument("--keep", action="store_true", help="keep what was recorded with other code")
    parser.add_argument("--publish", action="store_true", help="publish the records of the named model types")
    parser.add_argument("--plan-only", action="store_true", help="run no kernel, and print the answers that differ")
    options = parser.parse_args()
    release = transformers.__version__
    kept = Kept(KEPT / release / ("plans" if options.plan_only else options.kernels), any_code=options.keep)
    if options.fresh:
        shutil.rmtree(kept.folder, ignore_errors=True)
    worker = functools.partial(works, options.kernels, options.plan_only)
    do = functools.partial(survey, kept=kept, worker=worker, jobs=options.jobs)
    if options.plan_only:
        sys.exit(judged(release, do))
    if options.model_types:
        records = do(options.model_types)
        if options.publish:
            publish(release, among_the_published(release, options.kernels, records), in_part=True)
    elif options.kernels == COMPILED:
        records = do(model_types())
        records += do([CLASS + "/".join(each) for each in left(Census.of(), records)])
        publish(release, contents(release, records))
    else:
        publish(release, {f"by {options.kernels}": in_short(do(model_types_compared(release)))})


def judged(release: str, do: Callable[[Sequence[str]], list[dict[str, Any]]]) -> bool:
    """Print the answers that differ from the published ones; return whether anything that was fused no longer is."""
    census = Census.of()
    records = do(model_types())
    fused = {dataclasses.astuple(answer)[:3] for answer in answers(census, records) if answer.how == "fused"}
    classes = [task for task in single_class.classes(census) if task.op == "rope" or tuple(task) not in fused]
    now = answers(census, records + do([CLASS + "/".join(task) for task in classes]))
    others = [*changes((Answer(**answer) for answer in published()[release]["answers"]), now)]
    print(*fused_of_each_op(now), *others, sep="\n")
    return any(change.lost for change in others)


def among_the_published(release: str, kernels: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is published of *release*, with *records* in place of those of the same model types and classes.

    The totals of classes are counted anew, for the ops that the last whole run asked about, and for every op of which
    each class is known by now. The rest of the summary stays that of the last whole run.
    """
    now = published()[release]
    if kernels != COMPILED:
        fresh = {record["model_type"]: record for record in in_short(records)}
        return {f"by {kernels}": [fresh.get(record["model_type"], record) for record in now[f"by {kernels}"]]}
    fresh = {_task(record): record for record in without_code(records)}
    merged = contents(release, [*({_task(record): record for record in now["records"]} | fresh).values()])
    unknown = {answer["op"] for answer in merged["answers"] if answer["how"] in ("not built", "no answer")}
    asked = {*now["summary"]["ops"], *(op for op in merged["summary"]["ops"] if op not in unknown)}
    totals = {op: numbers for op, numbers in merged["summary"]["ops"].items() if op in asked}
    kept = [answer for answer in merged["answers"] if answer["op"] in asked]
    return merged | {"answers": kept, "summary": now["summary"] | {"ops": totals}}


def _task(record: Mapping[str, Any]) -> str:
    """The task with which `survey` makes *record*."""
    if "model_type" in record:
        return str(record["model_type"])
    return CLASS + "/".join(record[name] for name in ("op", "folder", "class"))


def model_types() -> list[str]:
    """All model types for which transformers has a config."""
    return sorted(transformers.CONFIG_MAPPING.keys())


def model_types_compared(release: str) -> list[str]:
    """The model types that were fused and compared, according to what is published."""
    records = published()[release]["records"]
    return [record["model_type"] for record in records if "model_type" in record and record["status"] == "checked"]


def left(census: Census, records: Sequence[dict[str, Any]]) -> list[single_class.Class]:
    """The classes about which *records* of models do not tell enough, so that they are surveyed by themselves."""
    told = {answer[:3] for answer in map(dataclasses.astuple, answers(census, records)) if answer[-1]}
    callers = {(site["folder"], site["class"]) for r in records for site in r.get("sites", ()) if site["op"] == "rope"}
    return [
        each
        for each in single_class.classes(census)
        if (each[1:] not in callers if each.op == "rope" else tuple(each) not in told)
    ]


class Kept:
    """The records of one release, each in a file."""

    def __init__(self, folder: Path, any_code: bool = False) -> None:
        self.folder = folder
        self._any_code = any_code
        self._code = _code()

    def get(self, task: str) -> dict[str, Any] | None:
        """The record of *task*, if it was made with this code, or if any code will do."""
        path = self._path(task)
        if not path.exists():
            return None
        record = json.loads(path.read_text())
        return record if self._any_code or record["code"] == self._code else None

    def put(self, task: str, record: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._path(task).write_text(json.dumps(record | {"code": self._code}, indent=1))

    def _path(self, task: str) -> Path:
        return self.folder / f"{task.replace('/', ' ')}.json"


def survey(wanted: Sequence[str], kept: Kept, worker: Callable[[], pool.Work], jobs: int) -> list[dict[str, Any]]:
    """The records of *wanted*; missing ones are made."""
    tasks = [task for task in wanted if kept.get(task) is None]
    columns = (*rich.progress.Progress.get_default_columns(), rich.progress.TextColumn("{task.fields[now]}"))
    with rich.progress.Progress(*columns) as progress:
        bar = progress.add_task(
            f"transformers {transformers.__version__}, {kept.folder.name}", total=len(tasks), now=""
        )

        def done(task: str, record: dict[str, Any]) -> None:
            record = record if task.startswith(CLASS) else {"model_type": task} | record
            kept.put(task, record | {"recorded": datetime.date.today().isoformat()})
            progress.update(bar, advance=1, now=f"{task}: {record['status']}")
            if not progress.console.is_terminal:
                print(f"{task}: {record['status']}", flush=True)

        pool.run(tasks, worker, done, jobs, LIMIT)
    return [record for task in wanted if (record := kept.get(task)) is not None]


def published(folder: Path = DOCS) -> dict[str, dict[str, Any]]:
    """The contents of coverage.json, by release."""
    path = folder / "coverage.json"
    return json.loads(path.read_text())["releases"] if path.exists() else {}


def publish(release: str, found: Mapping[str, Any], folder: Path = DOCS, *, in_part: bool = False) -> None:
    """Write coverage.json and coverage.md, with *found* in place of what they say of *release*.

    Both name the machine of the last run that was published whole, not *in_part*.
    """
    releases = published(folder)
    about = json.loads((folder / "coverage.json").read_text())["machine"] if in_part else machine()
    releases[release] = {**releases.get(release, {}), **found}
    newest_first = dict(sorted(releases.items(), key=lambda item: Version(item[0]), reverse=True))
    (folder / "coverage.json").write_text(to_json(newest_first, about))
    (folder / "coverage.md").write_text(to_markdown(newest_first, about, ROUNDINGS, TIMES))


def contents(release: str, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What to publish of *records* of models and classes."""
    census = Census.of(release)
    return {
        "summary": summary(census, records),
        "answers": [dataclasses.asdict(answer) for answer in answers(census, records)],
        "records": without_code(records),
    }


def without_code(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """*records* without the fingerprint of the code with which they were made."""
    return [{name: value for name, value in record.items() if name != "code"} for record in records]


def in_short(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What to publish of *records* of models that other kernels than Inductor's fused."""
    told = ("model_type", "status", "why", *DTYPES)
    return [
        {name: record[name] for name in told if name in record}
        | {"fused": sum(site["count"] for site in record.get("sites", ()) if site["fused"])}
        for record in records
    ]


def works(kernels: str, plan_only: bool) -> pool.Work:
    """The function that checks a model type or a class, for use in a process of its own."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    kind = KERNEL_KINDS[kernels]
    manager = kind.manager()
    until_the_process_ends = kind.ready(manager)  # if it were garbage-collected, it would end what it began
    until_the_process_ends.__enter__()
    import_every_model()
    census = Census.of()
    others = ELSEWHERE if kernels == COMPILED else ()

    def work(task: str, _: object = until_the_process_ends) -> dict[str, Any]:
        try:
            if task.startswith(CLASS):
                return single_class.check(manager, single_class.Class(*task.removeprefix(CLASS).split("/")), plan_only)
            return check(manager, census, task, kind.device, others, plan_only)
        except Exception as error:  # the programs compiled in this process are worth more than one record
            return {"status": "died", "why": said(error)}

    return work


def _code() -> str:
    """A fingerprint of everything that a record depends on."""
    files = [*ROOT.glob("core/**/src/**/*.py"), *ROOT.glob("kernel-packages/*/src/**/*.py")]
    files += [*Path(__file__).parent.glob("*.py"), Path(__file__).with_name("classes.json"), ROOT / "constraints.txt"]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
