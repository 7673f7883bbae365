"""The command ``fuseplug check``."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Sequence

from rich.console import Console

from fuseplug.errors import DiscoveryError
from fuseplug.report.plain_text import one_line, some_lines
from fuseplug.report.tables import console

from .kit import announced, depth_of
from .naming import Named, all_ready, named
from .record import Record
from .shown import progress, show, summary
from .subjects import Depth, device_for

LEFT_OUT = {
    "quick": "Quick asks everything of one specimen, and of the others here whether values and gradients are right. It "
    "leaves out larger sizes than the kernel names, edges at the largest, and what importing its functions does.",
    "standard": "What is compiled takes minutes the first time; --quick takes less than a minute.",
    "thorough": "Every edge on every specimen at every size takes long.",
}


def check(
    names: Sequence[str],
    *,
    device: str | None = None,
    quick: bool = False,
    thorough: bool = False,
    checks: Sequence[str] | None = None,
    as_json: bool = False,
) -> int:
    """Check kernels, show the progress on stderr, and print the results.

    Args:
        names: As for `naming.named`; if there are none, every installed kernel that can run here.
        device: As for `fuseplug_testing.check_kernel`, and so are the next three.
        quick: Whether to check only a little.
        thorough: Whether to check everything.
        checks: The names of the checks to run; ``None`` for all.
        as_json: Whether to print JSON.

    Returns:
        The exit code: 0 if nothing is wrong, 1 if a kernel has faults or could not be run, 130 if interrupted.

    Raises:
        DiscoveryError: If there is no such kernel.
        PlanError: As for `fuseplug_testing.check_kernel`.
    """
    said, out = console(stderr=True), console()
    depth, records = depth_of(thorough=thorough, quick=quick), []
    try:
        for each in _chosen(names, device, said):
            # Output of kernels and torch_npu must not precede the JSON.
            with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                records.append(_checked(each, device, depth, checks, said))
            if not as_json:
                show(records[-1], out)
    except KeyboardInterrupt as interrupt:
        said.print(f"fuseplug: {some_lines(interrupt) or 'interrupted'}")
        return 130
    if as_json:
        print(json.dumps([record.to_dict() for record in records], indent=2))  # noqa: T201 - the output of the command
    elif len(records) > 1:
        summary(records, out)
    return int(any(record.verdict in ("failed", "unchecked") for record in records))


def _checked(each: Named, device: str | None, depth: Depth, checks: Sequence[str] | None, said: Console) -> Record:
    # Warnings of torch and kernels would tear the progress bar apart. The filters stay as they are, because a check
    # compares them.
    with warnings.catch_warnings(record=True):
        with said.status("looking at the kernel and its specimens"):
            record = Record(each, device, depth, checks)
        said.print(f"{announced(record.examined, record.steps)}. {LEFT_OUT[depth]}")
        with progress(record, said) as told:
            record.run(told)
    return record


def _chosen(names: Sequence[str], device: str | None, said: Console) -> list[Named]:
    if names:
        return [named(name) for name in dict.fromkeys(names)]
    kind, here = None if device is None else device.partition(":")[0], []
    for each in all_ready():
        if kind is not None and not each.kernel.runs_on(kind):
            continue
        _, place, why = device_for(each.kernel, device)
        if place is None:
            said.print(f"{each.kernel.kernel_id} is left out: {one_line(why)}")
        else:
            here.append(each)
    if not here:
        raise DiscoveryError("no installed kernel runs here; `fuseplug list` and `fuseplug doctor` say which there are")
    return here
