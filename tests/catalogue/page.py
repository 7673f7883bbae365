"""Writes docs/catalogue.md from docs/results/checks, as the last step of `nox -s catalogue`.

python tests/catalogue/page.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from catalogue.checks import CHECKS, LIMIT, ROOT, kernels

PAGE = ROOT / "docs" / "catalogue.md"
HEAD = """\
# Catalogue of kernels

This page lists kernels, from all distributions that sent a result, with what the conformance kit found. It is for
users who look for a kernel, and for authors who want theirs to be found. `nox -s catalogue` checks the kernels of
this repository again, and writes the page.

Each row is the result of `fuseplug check ID --quick --json`. The [checks](test-a-kernel.md#what-is-checked) run the
kernel against the modules that its author names, values and gradients. The second column counts checks: one is failed
if it found a fault on any specimen, and skipped if nothing could be asked. Links lead to the files. A row says nothing
of speed, and nothing of other machines: Fuseplug checks a kernel on yours before it uses it.
"""
COLUMNS = ("kernel", "passed, failed, skipped", "op", "ran on", "date", "distribution")
"""The results come early, because a narrow screen cuts off the right side of a table."""
ELSEWHERE = {
    "fuseplug-host-npu": "torch_npu on tensors in host memory. **No Ascend chip** has run these kernels. "
    "[What that shows](ascend.md#what-was-verified-and-how).",
    "Triton's interpreter": "Triton's interpreter. **No GPU** has run these kernels for this page. [What that "
    "shows](cuda.md#what-was-checked-and-how). For Liger-Kernel's programs the interpreter is changed, because it "
    "lacks some of what Triton's compiler gives them.",
}
"""What the page says of results without the device, by the name of what stood in for it."""

OWN = """\
## Add your kernel

A row is a file. Check the kernel on the machine that it is for, and open a pull request that adds the file:

```bash
pip install "fuseplug[testing]" your-distribution
fuseplug check your_kernel --quick --json > docs/results/checks/your_kernel.json
python tests/catalogue/page.py                     # writes this page; the tests compare it with the files
```

The result must be of a release that can be installed: the file names the distribution and its version. Several
kernels may be checked by one command into one file. Failed checks are no reason to be refused; the row shows them. A
newer result replaces the older one.
"""


def main() -> None:
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


def page() -> str:
    """The page, made from the files as they are now."""
    return "\n".join([HEAD, *_tables(list(_results())), *_missing(), OWN])


def _results() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The name of each file with each of its results."""
    for file in sorted(CHECKS.glob("*.json")):
        for result in json.loads(file.read_text()):
            yield file.name, result


def _tables(results: list[tuple[str, Mapping[str, Any]]]) -> Iterator[str]:
    """A table for kernels that ran on their devices, then one for each thing that stood in for a device."""
    stood_in = [(each["device"] or {}).get("emulated_by") for _, each in results]
    for emulator in sorted(set(stood_in), key=lambda name: name or ""):
        said = ELSEWHERE.get(emulator, f"{emulator}.") if emulator else ""
        yield f"## Run in {emulator}\n\nRun in {said}\n" if emulator else "## Run on their devices\n"
        yield _line(COLUMNS)
        yield _line(["---"] * len(COLUMNS))
        rows = [_row(*each) for each, name in zip(results, stood_in, strict=True) if name == emulator]
        yield from map(_line, sorted(rows, key=lambda row: (row[COLUMNS.index("distribution")], row)))
        yield ""


def _row(file: str, result: Mapping[str, Any]) -> list[str]:
    kernel, device, versions = result["kernel"], result["device"] or {}, result["versions"]
    states = [_state(check) for check in result["checks"]]
    found = [str(states.count(state)) for state in ("passed", "failed", "skipped")]
    if result["verdict"] not in ("passed", "failed"):
        found[0] += f" ({result['verdict']})"
    return [
        f"[`{kernel['id']}`](results/checks/{file})",
        ", ".join(found),
        kernel["op"] or "",
        f"{_place(device)}; torch {versions['torch']}",
        result["date"][:10],
        f"{kernel['distribution'] or 'none'} {kernel['version'] or ''}".strip(),
    ]


def _place(device: Mapping[str, Any]) -> str:
    """The device on which the kernel ran, marked as emulated if a stand-in goes by its name."""
    name = device.get("name") or device.get("type") or "nothing"
    return f"{name}, emulated" if device.get("emulated_by") and device.get("type") != "cpu" else name


def _state(check: Mapping[str, Any]) -> str:
    return next((state for state in ("failed", "passed") if check[state]), "skipped")


def _missing() -> Iterator[str]:
    absent = [f"`{name}`" for name in kernels() if not (CHECKS / f"{name}.json").exists()]
    if absent:
        yield (
            f"**Without a row**, because the check takes longer than {LIMIT / 60:.0f} minutes where there is no device:"
            f" {', '.join(absent)}.\n"
        )


def _line(cells: Any) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
