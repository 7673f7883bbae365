"""Renders docs/npu-models.md and docs/zh/npu-models.md from the published records: what NPUs fuse, by names of models.

PYTHONPATH=tests python -m survey.npu_page
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .checking import DTYPES
from .npu_families import FAMILIES, PATCHES, Family
from .page import _short, _table

DOCS = Path(__file__).parents[2] / "docs"
RELEASE = "5.24.0"
_OPS = ("rmsnorm", "swiglu", "rope", "moe")
_COUNTED = (*_OPS, "linear_cross_entropy", "gated_delta_rule", "ssd")
_ENGLISH = f"""\
# Models on Ascend NPUs, by name

This page says what the kernels for Ascend NPUs fuse in models of transformers {RELEASE}, by the names that people call
the models. It is for users who want to know about theirs. [中文](zh/npu-models.md)

**No kernel has run on an Ascend chip.** Each model type was built small, planned for an NPU, and compared with itself
unfused on [the stand-in in host memory](test-without-an-npu.md): outputs and every gradient, in float32 and bfloat16.

* **✓** means that all modules with this op are fused; behind it is what Fuseplug found them to compute. **In part**:
  [below](#left-alone) is what is left alone, and why. **–** means that no module has this op.
* **Loss** is fused if you agree with `allow=["lazy_logits"]`. This column is from [another survey](losses.md): on the
  CPU, with a kernel in plain PyTorch. Models with a head were compared here with the loss by the kernel for NPUs.
* **Compared** is the largest share of the [tolerance](coverage.md) that any tensor needed, in float32 and in bfloat16.
  More than 1 would be a mismatch.
* **Patched by** names the frameworks whose own patches for NPUs [name the type](#patches-of-frameworks). The
  types of LLaMA-Factory are not in this column: only their number is known here.

Fuseplug does not replace softmax attention. Of linear attention, as in Qwen3-Next, Qwen3.5 and Kimi-Linear, the gated
delta rule has [a kernel for NPUs](../kernel-packages/gated-delta-rule/README.md), and so has [the chunk scan of
Mamba-2](../kernel-packages/ssd/README.md). Both were compared, and are in no column. Convolutions and selective scans
have kernels for CPUs only. A model is in this list only if transformers has its type: one that runs code from its own
repository (`trust_remote_code`) is not. All other types are on [Coverage](coverage.md); for any model, with or without
code of its own, ask `fuseplug plan MODEL --device npu`.

`python -m survey.npu_page` makes this page from [coverage.json](coverage.json) and [losses.md](losses.md).
"""
_CHINESE = f"""\
# NPU 模型支持表

本页按常用的模型名，列出昇腾 NPU 算子在 transformers {RELEASE} 的各模型中融合了什么。[English](../npu-models.md)

**NPU 算子尚未在真实芯片上运行过。** 每个模型类型都按小尺寸构建，按 NPU 制定计划，\
再在[主机内存中的 NPU](../test-without-an-npu.md) 上与融合前对比输出和全部梯度，精度为 float32 和 bfloat16。

* **✓**：该算子对应的模块全部融合，后面是识别出的计算公式。\
**部分**：没有融合的模块及原因见[下文](#没有融合的模块)。**–**：模型中没有这种模块。
* **损失**：需要同意 `allow=["lazy_logits"]` 才融合。\
这一列来自[另一项调查](../losses.md)，在 CPU 上用纯 PyTorch 实现的算子完成。\
有输出头的模型，本页的对比也包含 NPU 的损失算子。
* **对比**：所有张量中，误差占[允许误差](../coverage.md)的最大比例，依次为 float32 和 bfloat16；大于 1 即不一致。
* **框架补丁**：哪些框架自带的 NPU 补丁[点名了这个类型](#各框架自带的-npu-补丁)。\
LLaMA-Factory 的类型没有逐一列出：这里只知道数量。

Fuseplug 不替换 softmax 注意力。Qwen3-Next、Qwen3.5、Kimi-Linear 等模型的线性注意力中，gated delta rule \
有 [NPU 算子](../../kernel-packages/gated-delta-rule/README.md)，\
Mamba-2 的 chunk scan 也有 [NPU 算子](../../kernel-packages/ssd/README.md)，二者参与了对比，但表中没有单独的列；\
因果卷积和 selective scan 目前只有 CPU 算子。\
表中只有 transformers 自带的类型，不包括运行仓库内代码（`trust_remote_code`）的模型。\
其余类型见 [Coverage](../coverage.md)。任何模型都可以用 `fuseplug plan MODEL --device npu` 查询。

本页由 `python -m survey.npu_page` 根据 [coverage.json](../coverage.json) 和 [losses.md](../losses.md) 生成。
"""


class Words(NamedTuple):
    """The words of a page in its language."""

    path: str
    head: str
    in_part: str
    columns: tuple[str, ...]
    left_alone: str
    left_alone_columns: tuple[str, ...]
    patches: str
    patches_columns: tuple[str, ...]
    described: str


PAGES = (
    Words(
        "npu-models.md",
        _ENGLISH,
        "in part: ",
        ("model", "type", "norms", "gated MLPs", "rotations", "experts", "loss", "compared", "patched by"),
        "Left alone",
        ("model", "class", "why"),
        "Patches of frameworks",
        ("framework", "patches", "source", "date"),
        "english",
    ),
    Words(
        "zh/npu-models.md",
        _CHINESE,
        "部分：",
        ("模型", "类型", "归一化", "门控 MLP", "RoPE", "MoE 专家", "损失", "对比", "框架补丁"),
        "没有融合的模块",
        ("模型", "类", "原因"),
        "各框架自带的 NPU 补丁",
        ("框架", "补丁范围", "出处", "日期"),
        "chinese",
    ),
)


def to_markdown(words: Words, content: Mapping[str, Any], losses: Mapping[str, str]) -> str:
    """The page in the language of *words*.

    Raises:
        ValueError: If a family was not compared with the kernels for NPUs, or if the number of sites that they fuse is
            not that of the kernels for CPUs.
    """
    planned = {record["model_type"]: record for record in content["records"] if "model_type" in record}
    compared = {record["model_type"]: record for record in content["by npu"]}
    rows, left = [], []
    for family in FAMILIES:
        plan, result = planned[family.model_type], compared[family.model_type]
        fused = sum(site["count"] for site in plan["sites"] if site["fused"] and site["op"] in _COUNTED)
        if result["status"] != "checked" or result["fused"] != fused:
            raise ValueError(
                f"{family.model_type}: {fused} sites are fused on CPUs, and {result['fused']} of a model that is "
                f"{result['status']} by the kernels for NPUs; the page has no words for the rest: leave the family out"
            )
        alone = [site for site in plan["elsewhere"]["npu"]["left alone"] if site["op"] in _OPS]
        cells = (_of_op(op, plan["sites"], alone, words.in_part) for op in _OPS)
        worst = ", ".join(f"{result[dtype]['worst']:.2f}" for dtype in DTYPES)
        loss = losses.get(family.model_class, "✓")
        rows.append((family.name, f"`{family.model_type}`", *cells, loss, worst, _patched_by(family)))
        left += [(family.name, f"`{site['class']}`", _of_npu(site["why"])) for site in alone]
    patches = ((each.framework, getattr(each, words.described), each.source, each.date) for each in PATCHES)
    parts = [words.head, *_table(words.columns, rows)]
    parts += ["", f"## {words.left_alone}", "", *_table(words.left_alone_columns, left)]
    parts += ["", f"## {words.patches}", "", *_table(words.patches_columns, patches)]
    return "\n".join(parts) + "\n"


def losses_not_fused(page: str) -> dict[str, str]:
    """The status on ``losses.md`` of each class whose loss is not fused."""
    return {
        name: status
        for name, status in re.findall(r"^\| (\w+) \| ([^|]+) \| [^|]+ \| [^|]*\|$", page, re.MULTILINE)
        if status != "fused"
    }


def _of_op(op: str, sites: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]], in_part: str) -> str:
    variants = dict.fromkeys(site["variant"] for site in sites if site["op"] == op and site["fused"])
    variants.pop("part of what is fused", None)
    if not variants:
        return "–"
    mark = in_part if any(site["op"] == op for site in alone) else "✓ "
    return f"{mark}{', '.join(variants)}"


def _patched_by(family: Family) -> str:
    return ", ".join(each.framework for each in PATCHES if family.model_type in each.model_types)


def _of_npu(why: str) -> str:
    """The reason that the kernel for NPUs gave, out of the reasons of all kernels."""
    parts = re.split(r"; (?=\w+_fused_)", why)
    return _short(next(part for part in parts if part.startswith("npu_")).partition(": ")[2])


def pages() -> Iterator[tuple[Path, str]]:
    """The path of each page, and the text that it should have."""
    content = json.loads((DOCS / "coverage.json").read_text())["releases"][RELEASE]
    losses = losses_not_fused((DOCS / "losses.md").read_text())
    yield from ((DOCS / words.path, to_markdown(words, content, losses)) for words in PAGES)


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
