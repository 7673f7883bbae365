"""What this machine has, what the installed kernels need, and how to get what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import importlib_metadata
import typer
from packaging.version import Version

from fuseplug.cli.commands import kernels_of
from fuseplug.cli.options import AsJson
from fuseplug.configuration import SETTINGS, Setting, named
from fuseplug.discovery.records import KernelRecord
from fuseplug.hookspecs import BaseKernel
from fuseplug.kernel_manager import KernelManager
from fuseplug.report.plain_text import one_line, some_lines
from fuseplug.report.tables import console, empty_table, print_json, print_table, state_text

from .ascend import AUTOLOAD_VARIABLE, ascend, cann_script
from .machine import Diagnosis, MachineState, State, first_cause, look, version_of
from .redaction import redacted
from .references import REFERENCE_FUNCTIONS, to_install

OLDEST_TRANSFORMERS = "4.57"
LINEAR_ATTENTION = {functions.package: functions.package_devices for functions in REFERENCE_FUNCTIONS}


def doctor(as_json: AsJson = False) -> None:
    """Check this machine and every installed kernel; exit with 1 if something installed cannot work."""
    records = kernels_of(KernelManager())  # before torch is imported, to see who imports it
    with console(stderr=True).status("importing torch and looking at the devices"):
        machine = look()
    rows = examine(machine, records)
    if as_json:
        print_json([row._asdict() for row in rows])
    else:
        _print_rows(rows)
    if any(row.state == "fail" for row in rows):
        raise typer.Exit(1)


def _print_rows(rows: Sequence[Diagnosis]) -> None:
    out, table = console(), empty_table("", "what")
    table.add_column("found", ratio=1, overflow="fold")
    for row in rows:
        # People paste the table into issues.
        finding = redacted(f"{row.found}\n→ {row.remedy}" if row.remedy else row.found)
        table.add_row(state_text(row.state), one_line(row.name), some_lines(finding))
    print_table(out, table, "found")
    counts = [f"{sum(row.state == state for row in rows)} {state}" for state in ("ok", "warn", "fail")]
    out.print(", ".join(counts))


def examine(machine: MachineState, records: Sequence[KernelRecord]) -> list[Diagnosis]:
    """Carry out every check."""
    first = [python(), torch(machine), devices(machine), *ascend(machine)]
    libraries = [transformers(), accelerate(), linear_attention(machine)]
    settings = [_setting(machine, setting) for setting in SETTINGS.values()]
    return [*first, *libraries, *settings, *_kernels(machine, records)]


def python() -> Diagnosis:
    """The interpreter, and the system."""
    return Diagnosis("Python", "ok", f"{platform.python_version()} on {platform.platform()} ({sys.executable})")


def torch(machine: MachineState) -> Diagnosis:
    """PyTorch. Importing it can fail because of a vendor's backend that it loads automatically."""
    error = machine.torch_error
    if error is None:
        return Diagnosis("torch", "ok", str(machine.torch.__version__))
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return Diagnosis("torch", "fail", "not installed", "pip install torch")
    failure = f"cannot be imported: {first_cause(error)}"
    backends = [entry.name for entry in importlib_metadata.entry_points(group="torch.backends")]
    if not backends:
        return Diagnosis("torch", "fail", failure, "pip install --force-reinstall torch")
    cann = f"source {cann_script()}, or set " if version_of("torch_npu") else "set "
    finding = f"{failure}; torch loads {', '.join(backends)} by itself, which needs its vendor's libraries"
    return Diagnosis("torch", "fail", finding, f"{cann}{AUTOLOAD_VARIABLE}=0 to do without it")


def devices(machine: MachineState) -> Diagnosis:
    """The devices that tensors can be put on now."""
    if machine.torch is None:
        return Diagnosis("devices", "warn", "unknown, as torch cannot be imported")
    return Diagnosis("devices", "ok", ", ".join(_device(machine.torch, kind) for kind in machine.devices))


def transformers() -> Diagnosis:
    """The model library, needed only to name a model on the command line."""
    version = version_of("transformers")
    install = 'pip install --upgrade "fuseplug[transformers]"'
    if version is None:
        return Diagnosis("transformers", "ok", f"not installed (`fuseplug plan` needs it: {install})")
    if Version(version) < Version(OLDEST_TRANSFORMERS):
        finding = f"{version}; kernels are tested with {OLDEST_TRANSFORMERS} and later"
        return Diagnosis("transformers", "warn", finding, install)
    return Diagnosis("transformers", "ok", version)


def accelerate() -> Diagnosis:
    """The library that spreads and offloads models."""
    return Diagnosis("accelerate", "ok", version_of("accelerate") or "not installed (only device_map= needs it)")


def linear_attention(machine: MachineState) -> Diagnosis:
    """The packages that transformers calls for linear attention and state spaces, on any device."""
    installed = {name: version for name in LINEAR_ATTENTION if (version := version_of(name))}
    idle = [name for name in installed if not {*LINEAR_ATTENTION[name]} & {*machine.devices}]
    packages = ", ".join(map(" ".join, installed.items()))
    packages = packages or "no package, so models such as Qwen3.5 and Mamba run transformers' reference code in PyTorch"
    if not idle or machine.torch is None:
        lacking = to_install(machine.devices)
        remedy = f"for such models, pip install {' '.join(lacking)}" if lacking else ""
        return Diagnosis("linear attention", "ok", packages, remedy)
    devices = " or ".join(dict.fromkeys(kind for name in idle for kind in LINEAR_ATTENTION[name]))
    finding = f"{packages}, but this machine has no {devices}; transformers calls {' and '.join(idle)} on any device"
    remedy = f"pip uninstall {' '.join(idle)}, and transformers uses functions of its own, which kernels can replace"
    return Diagnosis("linear attention", "warn", finding, remedy)


def _kernels(machine: MachineState, records: Sequence[KernelRecord]) -> Iterator[Diagnosis]:
    if not records:
        yield Diagnosis("kernels", "warn", "none installed", "pip install fuseplug-rmsnorm, for one")
    for record in records:
        yield _kernel(machine, record)


def _kernel(machine: MachineState, record: KernelRecord) -> Diagnosis:
    state, readiness, remedy = _loading(record) if record.kernel is None else _running(machine, record.kernel)
    if record.import_costs:
        state = "warn" if state == "ok" else state
        readiness, remedy = f"{readiness}, but {'; '.join(record.import_costs)}", remedy or "tell whoever wrote it"
    source = f"{record.distribution} {record.version}".strip()
    return Diagnosis(record.kernel_id, state, f"{readiness} ({source})" if source else readiness, remedy)


def _loading(record: KernelRecord) -> tuple[State, str, str]:
    """Why there is no kernel. It is no fault if the user turned it off, left it out or asked for it in vain."""
    chosen = record.state in ("off", "not allowed", "not installed")
    state: State = "ok" if chosen else "fail" if record.distribution else "warn"
    remedy = "`fuseplug list -v` shows the traceback" if record.traceback else ""
    return state, f"{record.state}: {record.reason}", remedy


def _running(machine: MachineState, kernel: BaseKernel) -> tuple[State, str, str]:
    if machine.torch is None:
        return "warn", "ready, but not asked about this machine, as torch cannot be imported", ""
    here = [kind for kind in machine.devices if kernel.runs_on(kind)]
    if not here:
        return "ok", f"ready, but this machine has no {' or '.join(kernel.device_types)}", ""
    lacking = {kind: why for kind in here if (why := kernel.lacks(kind))}
    able = [kind for kind in here if kind not in lacking]
    if lacking:
        states = [f"ready on {', '.join(able)}"] if able else []
        states += [f"unavailable on {kind}: {why}" for kind, why in lacking.items()]
        return "warn" if able else "fail", "; ".join(states), ""
    if doubts := [doubt for kind in here if (doubt := kernel.doubts(kind))]:
        return "warn", f"ready on {', '.join(here)}, though {'; '.join(doubts)}", ""
    return "ok", f"ready on {', '.join(here)}", ""


def _device(torch: Any, kind: str) -> str:
    try:
        if kind == "cpu":
            from fuseplug.devices import processor  # imports torch

            return f"cpu ({processor()})"
        module = torch.get_device_module(kind)
        names = dict.fromkeys(module.get_device_name(index) for index in range(module.device_count()))
        return f"{kind} ({module.device_count()} × {', '.join(names)})"
    except Exception:  # noqa: BLE001 - a name for people; not every vendor's module gives one
        return kind


def _setting(machine: MachineState, setting: Setting) -> Diagnosis:
    value, name = machine.environ.get(setting.variable), named(machine.environ, setting.variable)
    return Diagnosis(name, "ok", f"not set ({setting.unset})" if value is None else f"{value!r}")
