"""Pages agree with the code and the configuration."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from test_docs import blocks

from fuseplug import Site

ROOT = Path(__file__).parents[1]
KERNELS = {
    "rmsnorm": "InductorRMSNormKernel",
    "swiglu": "InductorSwiGLUKernel",
    "rope": "InductorRoPEKernel",
    "moe": "InductorMoEKernel",
    "linear_cross_entropy": "InductorLinearCrossEntropyKernel",
    "causal_conv1d": "InductorCausalConv1dKernel",
    "gated_delta_rule": "InductorGatedDeltaRuleKernel",
    "selective_scan": "InductorSelectiveScanKernel",
    "ssd": "InductorSSDKernel",
}


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table in *page* whose first column is called *first*, without the head of the table."""
    text = (ROOT / "docs" / page).read_text()
    table = re.search(rf"^\| *{re.escape(first)} *\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def span(numbers: set[float]) -> str:
    least, most = (f"{round(end, 1):g}" for end in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"


@pytest.mark.parametrize("op", KERNELS)
def test_the_tolerances_are_those_of_the_proposals(op):
    kernel = getattr(importlib.import_module(f"fuseplug_{op}.kernels"), KERNELS[op])()
    specimens = importlib.import_module(f"fuseplug_{op}.specimens").specimens()
    sites = [Site(path, module, "cpu") for specimen in specimens for path, module in specimen.named_modules()]
    answers = [answer for site in sites if isinstance(answer := kernel.match(site), list)]
    found = [each for answer in answers for proposal in answer for each in proposal.all_targets]
    stated = {row[0]: row[1:4] for row in rows("tolerances.md", "op")}
    exact = "bitwise" if all(each.exact for each in found) else "within"
    assert stated[op] == [
        exact,
        span({each.roundings for each in found}),
        span({each.working_roundings for each in found}),
    ]


def test_the_tolerances_are_of_every_op():
    assert [row[0] for row in rows("tolerances.md", "op")] == list(KERNELS)


def commands(readme: str) -> list[str]:
    """The commands that *readme* tells users to type, without comments."""
    lines = "".join(blocks(ROOT / readme, "bash")).splitlines()
    return [re.sub(r"  # .*|^# .*?[:：] ?(?=pip )", "", line) for line in lines]


def test_the_chinese_readme_has_the_commands_of_the_english_one():
    assert commands("README.zh-CN.md") == commands("README.md")
    assert len(commands("README.md")) == 5


PINNED = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
NOXFILE = (ROOT / "noxfile.py").read_text()
METADATA = "\n".join(path.read_text() for path in sorted(ROOT.glob("*/pyproject.toml"))) + "\n".join(
    path.read_text() for path in sorted(ROOT.glob("kernel-packages/*/pyproject.toml"))
)


BESIDES = (
    "kernels",
    "accelerate",
    "peft",
    "trl",
    "lightning",
    "deepspeed",
    "llamafactory",
    "ms-swift",
    "torchao",
    "bitsandbytes",
    "liger-kernel",
    "diffusers",
    "timm",
    "torchvision",
)


def constant(name: str) -> list[str]:
    """The strings in the constant *name* of noxfile.py."""
    return re.findall(r'"([\w.]+)"', re.search(rf"^{name} = (.*)$", NOXFILE, re.MULTILINE)[1])


def versions_tested() -> dict[str, set[str]]:
    """Every version that a session installs, by column of the page or name of a package."""
    (oldest,) = set(re.findall(r'"torch>=([\d.]+)"', (ROOT / "core" / "pyproject.toml").read_text()))
    return {
        "torch": {PINNED["torch"], oldest, *constant("OTHER_TORCHES")},
        "transformers": {PINNED["transformers"], *constant("TRANSFORMERS"), *constant("TRANSFORMERS_OF_KERNELS")},
        "torch_npu": {PINNED["torch_npu"], *constant("OLDER_TORCH_NPU")},
        "triton": {PINNED["triton"]},
        **{name: {PINNED[name]} for name in BESIDES},
    }


def test_the_versions_are_those_that_sessions_install():
    stated: dict[str, set[str]] = {}
    for _, _, torch, transformers, besides in rows("versions.md", "session"):
        for name, text in (("torch", torch), ("transformers", transformers)):
            stated.setdefault(name, set()).update(re.findall(r"\d[\w.]*", text))
        for name, version in re.findall(r"([\w-]+) (\d[\w.]*)", besides):
            stated.setdefault(name, set()).add(version)
    assert stated == versions_tested()


def test_the_sessions_of_the_versions_exist():
    named = {name for row in rows("versions.md", "session") for name in re.findall(r"`([\w-]+)`", row[0])}
    defined = re.findall(r'^@nox\.session(?:\(name="([\w-]+)")?.*\n(?:@.*\n)*def (\w+)', NOXFILE, re.MULTILINE)
    assert named <= {name or function for name, function in defined}
    assert len(named) > 5


@pytest.mark.parametrize("package", ["Python", "torch", "transformers", "torch_npu", "triton", "liger-kernel"])
def test_the_ranges_are_those_of_the_metadata(package):
    stated = dict(rows("versions.md", ""))[package]
    if package == "Python":
        found = set(re.findall(r'^requires-python = "(.*)"$', METADATA, re.MULTILINE))
    else:
        found = set(re.findall(rf'"{package}([<>=][^"]*)"', METADATA))
    assert found == {stated}


BY_HAND = (
    "… ms-swift with the plug-in, and with LoRA",
    "LLaMA-Factory 0.9.5: `llamafactory-cli train`, its first trainer",
    "axolotl 0.19: `axolotl train`",
    "verl 0.9",
    "… a pipeline; a completion by `transformers serve`",
)
"""The stacks that no test covers, as their rows say."""


def test_the_stacks_are_shown_by_tests_that_exist():
    stack, shown = "", ""
    for name, _, _, by in rows("integrations.md", "stack"):
        stack, shown = name or stack, shown if by == "the same" else by
        files = re.findall(r"`([\w/]+\.py)`", shown)
        assert bool(files) is (stack not in BY_HAND), stack
        assert [each for each in files if not (ROOT / each).exists()] == [], stack
