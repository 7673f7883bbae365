"""What this machine has, what the installed kernels need, and how to get what is missing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import importlib_metadata
import typer
from packaging.version import Version

from fuseplug.cli.commands import kernels_of
from fuseplug.cli.options import AsJson
from fuseplug.configuration import SETTINGS, environment, named
from fuseplug.discovery.records import KernelRecord
from fuseplug.hookspecs import BaseKernel
from fuseplug.kernel_manager import KernelManager
from fuseplug.plain_text import one_line, some_lines
from fuseplug.tables import console, empty_table, print_json, print_table, state_text

from .references import REFERENCE_FUNCTIONS, to_install

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CANN_VARIABLE = "ASCEND_HOME_PATH"
CANN_SCRIPT = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
OLDEST_TRANSFORMERS = "4.57"
LINEAR_ATTENTION = {functions.package: functions.package_devices for functions in REFERENCE_FUNCTIONS}

State = Literal["ok", "warn", "fail"]


class Diagnosis(NamedTuple):
    """What one check found.

    Attributes:
        name: What was looked at.
        state: ``"fail"`` means that something installed cannot work.
        found: What is there.
        remedy: What to do about it; ``""`` if there is nothing to do.
    """

    name: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class MachineState:
    """What the checks look at.

    Attributes:
        environ: The environment variables, and what the user's file says of those of Fuseplug.
        torch: The module, if it could be imported.
        torch_error: What it raised if it could not.
        devices: The device types that are present.
        npus: How many Ascend NPUs the kernel driver shows, whether torch knows them or not.
    """

    environ: Mapping[str, str]
    torch: Any = None
    torch_error: BaseException | None = None
    devices: Sequence[str] = ()
    npus: int = 0


MachineCheck = Callable[[MachineState], Diagnosis]


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
        # People paste the table into issues, and a home has a person's name.
        found = (f"{row.found}\n→ {row.remedy}" if row.remedy else row.found).replace(f"{Path.home()}/", "~/")
        table.add_row(state_text(row.state), one_line(row.name), some_lines(found))
    print_table(out, table, "found")
    counts = [f"{sum(row.state == state for row in rows)} {state}" for state in ("ok", "warn", "fail")]
    out.print(", ".join(counts))


def look(environ: Mapping[str, str] | None = None) -> MachineState:
    """Import torch and list the devices. If that fails, the error is kept for the checks to explain.

    Raises:
        SettingsError: If *environ* is not given, and the user's file is not right.
    """
    environ = environment() if environ is None else environ
    npus = len(list(Path("/dev").glob("davinci[0-9]*")))
    try:
        import torch

        from fuseplug.devices import KNOWN, present

        return MachineState(environ, torch=torch, devices=sorted(kind for kind in KNOWN if present(kind)), npus=npus)
    except Exception as error:  # noqa: BLE001 - torch runs the vendors' code on import, and drivers fail in many ways
        return MachineState(environ, torch_error=error, npus=npus)


def examine(machine: MachineState, records: Sequence[KernelRecord]) -> list[Diagnosis]:
    """Carry out every check."""
    return [check(machine) for check in CHECKS] + list(_kernels(machine, records))


def version_of(distribution: str) -> str | None:
    """The version of *distribution* that is installed."""
    try:
        return importlib_metadata.version(distribution)
    except importlib_metadata.PackageNotFoundError:
        return None


def python(machine: MachineState) -> Diagnosis:
    """The interpreter."""
    del machine
    return Diagnosis("Python", "ok", f"{platform.python_version()} ({sys.executable})")


def torch(machine: MachineState) -> Diagnosis:
    """PyTorch. Importing it can fail because of a vendor's backend that it loads automatically."""
    error = machine.torch_error
    if error is None:
        return Diagnosis("torch", "ok", str(machine.torch.__version__))
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return Diagnosis("torch", "fail", "not installed", "pip install torch")
    failure = f"cannot be imported: {_first_cause(error)}"
    backends = [entry.name for entry in importlib_metadata.entry_points(group="torch.backends")]
    if not backends:
        return Diagnosis("torch", "fail", failure, "pip install --force-reinstall torch")
    cann = f"source {CANN_SCRIPT}, or set " if version_of("torch_npu") else "set "
    return Diagnosis(
        "torch",
        "fail",
        f"{failure}; torch loads {', '.join(backends)} by itself, which needs its vendor's libraries",
        f"{cann}{AUTOLOAD_VARIABLE}=0 to do without it",
    )


def devices(machine: MachineState) -> Diagnosis:
    """The devices that tensors can be put on now."""
    if machine.torch is None:
        return Diagnosis("devices", "warn", "unknown, as torch cannot be imported")
    return Diagnosis("devices", "ok", ", ".join(_device(machine.torch, kind) for kind in machine.devices))


def torch_npu(machine: MachineState) -> Diagnosis:
    """Ascend's extension of PyTorch, which needs the CANN toolkit."""
    version, torch_version = version_of("torch_npu"), version_of("torch")
    remedy = "pip install torch torch_npu"
    if torch_version:
        remedy = f'pip install --upgrade "torch_npu=={".".join(torch_version.split(".")[:2])}.*"'
    if version is None:
        if machine.npus or machine.environ.get(CANN_VARIABLE):
            seen = f"{machine.npus} Ascend NPUs" if machine.npus else f"CANN ({CANN_VARIABLE})"
            return Diagnosis("torch_npu", "warn", f"not installed, though {seen} are here", remedy)
        return Diagnosis("torch_npu", "ok", "not installed (only Ascend NPUs need it)")
    if torch_version and Version(version).release[:2] != Version(torch_version).release[:2]:
        return Diagnosis("torch_npu", "fail", f"{version}, which is not made for torch {torch_version}", remedy)
    if machine.torch is None:
        return Diagnosis("torch_npu", "warn", f"{version}; see torch")
    if "npu" in machine.devices:
        return Diagnosis("torch_npu", "ok", version)
    if machine.environ.get(AUTOLOAD_VARIABLE) == "0":
        return Diagnosis(
            "torch_npu", "warn", f"{version}, not loaded: {AUTOLOAD_VARIABLE}=0", f"unset {AUTOLOAD_VARIABLE}"
        )
    if not machine.environ.get(CANN_VARIABLE):
        without = f"{version}, without CANN ({CANN_VARIABLE} is not set)"
        return Diagnosis("torch_npu", "fail", without, f"source {CANN_SCRIPT}")
    return Diagnosis(
        "torch_npu", "warn", f"{version}, but no NPU is available", "npu-smi info says what the driver sees"
    )


def transformers(machine: MachineState) -> Diagnosis:
    """The model library, needed only to name a model on the command line."""
    del machine
    version = version_of("transformers")
    install = 'pip install --upgrade "fuseplug[transformers]"'
    if version is None:
        return Diagnosis("transformers", "ok", f"not installed (`fuseplug plan` needs it: {install})")
    if Version(version) < Version(OLDEST_TRANSFORMERS):
        return Diagnosis(
            "transformers", "warn", f"{version}; kernels are tested with {OLDEST_TRANSFORMERS} and later", install
        )
    return Diagnosis("transformers", "ok", version)


def accelerate(machine: MachineState) -> Diagnosis:
    """The library that spreads and offloads models."""
    del machine
    return Diagnosis("accelerate", "ok", version_of("accelerate") or "not installed (only device_map= needs it)")


def kernels_variable(machine: MachineState) -> Diagnosis:
    """Which kernels the user chose."""
    return _variable(machine, "kernels")


def allow_variable(machine: MachineState) -> Diagnosis:
    """Whose code the user allows to be imported."""
    return _variable(machine, "allow")


def linear_attention(machine: MachineState) -> Diagnosis:
    """The packages that transformers calls for linear attention and state spaces, wherever the tensors are."""
    installed = {name: version for name in LINEAR_ATTENTION if (version := version_of(name))}
    idle = [name for name in installed if not {*LINEAR_ATTENTION[name]} & {*machine.devices}]
    packages = ", ".join(map(" ".join, installed.items()))
    packages = packages or "no package, so models such as Qwen3.5 and Mamba run transformers' reference code in PyTorch"
    if not idle or machine.torch is None:
        lacking = to_install(machine.devices)
        remedy = f"for such models, pip install {' '.join(lacking)}" if lacking else ""
        return Diagnosis("linear attention", "ok", packages, remedy)
    devices = " or ".join(dict.fromkeys(kind for name in idle for kind in LINEAR_ATTENTION[name]))
    return Diagnosis(
        "linear attention",
        "warn",
        f"{packages}, but this machine has no {devices}; transformers calls {' and '.join(idle)} on any device",
        f"pip uninstall {' '.join(idle)}, and transformers uses functions of its own, which kernels can replace",
    )


CHECKS: Sequence[MachineCheck] = (
    python,
    torch,
    devices,
    torch_npu,
    transformers,
    accelerate,
    linear_attention,
    kernels_variable,
    allow_variable,
)


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
    """Why there is no kernel: what the user turned off, left out or wants in vain is not the installation's fault."""
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
    if kind == "cpu":
        return kind
    try:
        module = torch.get_device_module(kind)
        names = dict.fromkeys(module.get_device_name(index) for index in range(module.device_count()))
        return f"{kind} ({module.device_count()} × {', '.join(names)})"
    except Exception:  # noqa: BLE001 - a name for people; not every vendor's module gives one
        return kind


def _variable(machine: MachineState, setting: str) -> Diagnosis:
    variable, unset = SETTINGS[setting].variable, SETTINGS[setting].unset
    value, name = machine.environ.get(variable), named(machine.environ, variable)
    return Diagnosis(name, "ok", f"not set ({unset})" if value is None else f"{value!r}")


def _first_cause(error: BaseException) -> str:
    """The first cause, which is what names the missing library."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip()}"
