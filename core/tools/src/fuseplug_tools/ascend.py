"""Checks what an Ascend NPU needs (CANN, driver, firmware, torch_npu), and what torch's attention runs there."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.version import InvalidVersion, Version

from .machine import Diagnosis, MachineState, first_cause, version_of

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
CANN_VARIABLE = "ASCEND_HOME_PATH"
ASCEND = Path("/usr/local/Ascend")
"""Where the driver, the firmware and CANN are installed by default."""

MADE_FOR: Mapping[str, tuple[str, ...]] = {
    "8.3.RC1": ("2.7.1", "2.8.0"),
    "8.5.0": ("2.7.1.post2", "2.8.0.post2", "2.9.0"),
    "9.0.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2"),
    "9.1.0": ("2.7.1.post5", "2.9.0.post3", "2.10.0", "2.11.0", "2.12.0"),
}
"""For each release of CANN, the first torch_npu of each series that is made for it. Source: COMPATIBILITY.md of
Ascend/pytorch at 031eec5c, August 2026. It does not list later series, such as 2.13.0, so neither does this table."""


def ascend(machine: MachineState) -> Iterator[Diagnosis]:
    """torch_npu; CANN and the driver, if anything of Ascend is here; attention, if torch sees an NPU."""
    yield torch_npu(machine)
    if machine.npus or machine.environ.get(CANN_VARIABLE) or version_of("torch_npu"):
        yield cann(machine)
        yield driver(machine)
    if "npu" in machine.devices:
        yield attention(machine)


def torch_npu(machine: MachineState) -> Diagnosis:
    """Ascend's extension of PyTorch, which needs the CANN toolkit."""
    version, torch_version = version_of("torch_npu"), version_of("torch")
    cann_home, row = machine.environ.get(CANN_VARIABLE), functools.partial(Diagnosis, "torch_npu")
    remedy = "pip install torch torch_npu"
    if torch_version:
        remedy = f'pip install --upgrade "torch_npu=={".".join(torch_version.split(".")[:2])}.*"'
    if version is None:
        if machine.npus or cann_home:
            seen = f"{machine.npus} Ascend NPUs" if machine.npus else f"CANN ({CANN_VARIABLE})"
            return row("warn", f"not installed, though {seen} are here", remedy)
        return row("ok", "not installed (only Ascend NPUs need it)")
    if torch_version and Version(version).release[:2] != Version(torch_version).release[:2]:
        return row("fail", f"{version}, which is not made for torch {torch_version}", remedy)
    if machine.torch is None:
        return row("warn", f"{version}; see torch")
    if "npu" in machine.devices:
        return row("ok", version)
    if machine.environ.get(AUTOLOAD_VARIABLE) == "0":
        return row("warn", f"{version}, not loaded: {AUTOLOAD_VARIABLE}=0", f"unset {AUTOLOAD_VARIABLE}")
    if not cann_home:
        return row("fail", f"{version}, without CANN ({CANN_VARIABLE} is not set)", f"source {cann_script()}")
    return row("warn", f"{version}, but no NPU is available", "npu-smi info says what the driver sees")


def cann(machine: MachineState) -> Diagnosis:
    """The CANN toolkit and the operators of the chip, according to the files that their installers leave behind."""
    home, torch_npu_version = machine.environ.get(CANN_VARIABLE), version_of("torch_npu") or "0"
    packages = [_entries(path) for path in sorted(Path(home).glob("*-linux/ascend_*_install.info"))] if home else []
    versions = {row.get("package_name", "").removeprefix("Ascend-cann-"): row.get("version", "") for row in packages}
    finding, remedy, wanted = ", ".join(map(" ".join, versions.items())), "", made_for(torch_npu_version)
    if not versions:
        finding = f"unknown: {CANN_VARIABLE} is {f'{home}, where no package says its version' if home else 'not set'}"
        remedy = f"source {cann_script()}"
    elif len({*versions.values()}) > 1:
        remedy = "install the toolkit and the operators of the chip in one version"
    elif wanted and _is_older(version := next(iter(versions.values())), wanted):
        finding += f"; torch_npu {torch_npu_version} is made for CANN {wanted}"
        remedy = f"install CANN {wanted} or later, or the torch_npu that is made for CANN {version}"
    return Diagnosis("CANN", "warn" if remedy else "ok", finding, remedy)


def driver(machine: MachineState) -> Diagnosis:
    """The driver of the NPUs, and their firmware."""
    versions = {part: _entries(ASCEND / part / "version.info").get("Version") for part in ("driver", "firmware")}
    finding = ", ".join(f"{part} {version}" for part, version in versions.items() if version)
    remedy = ""
    if not finding and machine.npus:  # a container sees the devices, but this file only if it is mounted
        finding, remedy = f"unknown, without {ASCEND}/driver/version.info", "npu-smi info says the driver's version"
    return Diagnosis("NPU driver", "ok", finding or "not here", remedy)


def attention(machine: MachineState) -> Diagnosis:
    """What torch's attention runs on an NPU: the gradient of a call with 2,048 numbers names the operation."""
    torch = machine.torch
    try:
        query = torch.ones(1, 1, 32, 64, dtype=torch.float16, device="npu", requires_grad=True)
        gradient = torch.nn.functional.scaled_dot_product_attention(query, query, query).grad_fn.name()
    except Exception as error:  # noqa: BLE001 - a vendor's code may raise anything
        return Diagnosis("attention", "warn", f"scaled_dot_product_attention raises {first_cause(error)}")
    finding, remedy = "scaled_dot_product_attention runs npu_fusion_attention (FlashAttentionScore)", ""
    if "FusionAttention" not in gradient:
        finding = f"scaled_dot_product_attention runs no npu_fusion_attention: its gradient is {gradient}"
        remedy = 'in transformers, attn_implementation="flash_attention_2" runs npu_fusion_attention'
    return Diagnosis("attention", "warn" if remedy else "ok", finding, remedy)


def made_for(torch_npu_version: str) -> str | None:
    """The release of CANN that this version of torch_npu is made for; ``None`` if unknown."""
    ours = Version(torch_npu_version)
    rows = [(cann, first) for cann, firsts in MADE_FOR.items() for first in map(Version, firsts)]
    return next((cann for cann, first in reversed(rows) if first.release == ours.release and first <= ours), None)


def cann_script() -> Path:
    """The script that sets up CANN in a shell. CANN 8.5 and later have it in another directory."""
    scripts = [ASCEND / folder / "set_env.sh" for folder in ("cann", "ascend-toolkit")]
    return next((script for script in scripts if script.exists()), scripts[-1])


def _is_older(version: str, than: str) -> bool:
    try:
        return Version(version) < Version(than)
    except InvalidVersion:  # 8.0.RC2.alpha002
        return False


def _entries(path: Path) -> dict[str, str]:
    """The lines ``name=value`` of a file; none if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines)}
