"""The norms and gated MLPs of diffusers and timm: which are fused, and whether they still compute the same.

    python -m survey.libraries [files or models] [--jobs 2] [--keep]

No list of these classes exists. So every class of the two libraries that can be built is built, small and by itself.
It counts if a kernel answers for it, with a proposal or a rejection. Models, built small from their configs, show how
often each class occurs. Writes docs/coverage-libraries.json and .md.
"""

from __future__ import annotations

from . import vision_stand_in  # noqa: F401

# isort: split

import argparse
import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fuseplug import KernelManager, Report
from fuseplug_tools.bench import machine

from . import pool
from .build import give_values
from .checking import compared, planned, said
from .library_page import to_markdown
from .single_class import CALL, Called

ROOT = Path(__file__).parents[2]
KEPT = ROOT / ".nox" / "coverage-libraries"
PAGE = ROOT / "docs" / "coverage-libraries.md"
OPS = ("rmsnorm", "swiglu")
FOLDERS = {"diffusers": ("diffusers.models",), "timm": ("timm.layers", "timm.models")}
LARGEST = 100_000_000
"""A model with more parameters is not built."""

LIMIT = 1800.0
"""The most seconds that a file or a model may take."""

MODEL = "model "
"""The prefix of a model's task; the library and the name of the model follow."""

MOST_MODULES = 16
"""The most modules in a norm or a gated MLP, including itself."""

WIDTH = 64
_ARGUMENTS: tuple[tuple[str, Any], ...] = (
    (r".*head_dim|.*dim_head", 16),
    (r".*heads", 4),
    (r".*groups", 4),
    (r".*(depth|layers|blocks|num_experts)", 2),
    (r".*(drop|dropout).*", 0.0),
    (r".*(act|activation)(_fn|_type)?", "silu"),
    (r".*(bias|affine)", True),
    (r".*(inner|hidden|intermediate|ffn|mlp).*(dim|size|features|channels)?", 96),
    (r".*(ratio|mult|scale)", 2.0),
    (r".*eps", 1e-6),
    (r"kernel_size|stride|patch_size", 1),
    (r".*(size|dim|dims|features|width|model|channels|chs|planes|shape|channel)|(dim|features|channels)_.*", WIDTH),
)
"""The arguments given to a constructor, by patterns of parameter names."""

_SMALL: tuple[tuple[str, int], ...] = (
    (r".*(num|n)_.*(layers|blocks)|.*layers|.*depth", 1),
    (r".*(num|n)_.*heads", 2),
    (r".*(intermediate|ffn|hidden|inner|cross_attention|joint_attention|caption).*(dim|size|channels)", WIDTH),
    (r".*vocab_size|.*num_embeds.*", WIDTH),
)
"""The largest values for numbers in a model's config, by patterns of their names."""

_DIFFUSERS: Mapping[str, Mapping[str, Any]] = {
    "SD3Transformer2DModel": {"qk_norm": "rms_norm", "caption_projection_dim": 128},  # as in Stable Diffusion 3.5
    "Lumina2Transformer2DModel": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "axes_dim_rope": (4, 6, 6),
        "cap_feat_dim": 64,
    },
    "FluxTransformer2DModel": {},
    "Flux2Transformer2DModel": {},
    "SanaTransformer2DModel": {},
    "WanTransformer3DModel": {},
    "LTXVideoTransformer3DModel": {},
    "HunyuanVideoTransformer3DModel": {},
    "QwenImageTransformer2DModel": {},
    "ZImageTransformer2DModel": {"dim": 256, "n_heads": 2, "n_kv_heads": 2},
    "ChromaTransformer2DModel": {},
    "CosmosTransformer3DModel": {},
    "SkyReelsV2Transformer3DModel": {},
    "AuraFlowTransformer2DModel": {},
    "CogView4Transformer2DModel": {},
    "PixArtTransformer2DModel": {},
    "StableAudioDiTModel": {},
    "UVit2DModel": {},
}
"""The models of diffusers, with further arguments that their configs need."""

_TIMM: Mapping[str, Mapping[str, Any]] = {
    "test_vit": {},
    "test_vit3": {},
    "vit_giant_patch14_dinov2": {"embed_dim": 96, "depth": 1, "num_heads": 2},
    "vit_huge_plus_patch16_dinov3": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "vit_small_patch16_224": {"embed_dim": 64, "depth": 1, "num_heads": 2, "norm_layer": "rmsnorm"},
    "eva02_tiny_patch14_224": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "eva_giant_patch14_224": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "beit_base_patch16_224": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "deepseek_vit_412m": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "gemma4_vit_167m": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "qwen3_vit_88m": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "naflexvit_base_patch16_siglip": {"embed_dim": 64, "depth": 1, "num_heads": 2},
    "gmlp_s16_224": {},
    "gmixer_12_224": {},
    "test_convnext": {},
    "convnextv2_atto": {},
    "convnext_zepto_rms": {},
    "mobilenetv5_base": {},
    "vitamin_small_224": {},
    "test_mambaout": {},
    "csatv2": {},
}
"""The models of timm, with arguments that make them small: models whose files name a norm or gated MLP, and others."""


MODELS = {"diffusers": _DIFFUSERS, "timm": _TIMM}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", help="all, unless some are named")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", action="store_true", help="keep what was recorded before")
    parser.add_argument("--to", type=Path, default=PAGE, help="path of the page; its data is written beside it")
    given = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    tasks = given.tasks or [*files(), *models()]
    wanted = [task for task in tasks if not (given.keep and _path(task).exists())]
    pool.run(wanted, worker, _keep, given.jobs, LIMIT)
    if not given.tasks:
        publish([json.loads(_path(task).read_text()) for task in tasks], given.to)


def _path(task: str) -> Path:
    return KEPT / f"{task}.json"


def _keep(task: str, record: dict[str, Any]) -> None:
    _path(task).write_text(json.dumps({"task": task} | record))
    print(f"{task}: {record.get('status') or len(record.get('classes', ()))}", flush=True)


def publish(records: Sequence[Mapping[str, Any]], page: Path, partial: str = "") -> None:
    """Write the page and its data, a line for each class and model; *partial* says what is missing, if anything."""
    content = {
        "machine": machine() | {"libraries": {name: version(name) for name in ("diffusers", "timm")}},
        "partial": partial,
        "classes": sorted((c for r in records for c in r.get("classes", ())), key=lambda c: (c["module"], c["class"])),
        "models": [r for r in records if r["task"].startswith(MODEL)],
        "died": [r for r in records if r.get("status") == "died"],
    }
    rows = (
        f" {json.dumps(name)}: {json.dumps(value) if isinstance(value, dict | str) else _lines(value)}"
        for name, value in content.items()
    )
    page.with_suffix(".json").write_text("{\n" + ",\n".join(rows) + "\n}\n")
    page.write_text(to_markdown(content))


def _lines(rows: Sequence[Any]) -> str:
    return "[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]" if rows else "[]"


def files() -> list[str]:
    """The names of the Python modules of both libraries that define torch modules."""
    found = []
    for folder in (folder for folders in FOLDERS.values() for folder in folders):
        package = importlib.import_module(folder)
        for each in pkgutil.walk_packages(package.__path__, f"{folder}."):
            if not each.ispkg and not re.search(r"flax|_onnx|_pruned", each.name) and any(classes_in(each.name)):
                found.append(each.name)
    return found


def models() -> list[str]:
    """The tasks of all models."""
    return [f"{MODEL}{library} {name}" for library, names in MODELS.items() for name in names]


def classes_in(module: str) -> Iterator[type[nn.Module]]:
    """The subclasses of `nn.Module` that the Python module *module* defines."""
    try:
        found = vars(importlib.import_module(module))
    except Exception:  # something that it needs is not installed
        return
    for value in list(found.values()):
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module:
            yield value


def worker() -> Callable[[str], dict[str, Any]]:
    """The function that does a task, for use in a process of its own."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    manager = KernelManager(environ={})

    def work(task: str) -> dict[str, Any]:
        if task.startswith(MODEL):
            return model_record(manager, *task.removeprefix(MODEL).split())
        return {"classes": [record for cls in classes_in(task) for record in class_records(manager, cls)]}

    return work


def class_records(manager: KernelManager, cls: type[nn.Module]) -> Iterator[dict[str, Any]]:
    """The records of *cls* by itself: one for each op for which a kernel answers, none if no kernel does."""
    for module in instances(cls):
        report = manager.plan(module, verify=False).report
        ops = {entry.op for entry in report.entries if "" in entry.paths} & {*OPS}
        for op in sorted(ops):
            yield {"op": op, "module": cls.__module__, "class": cls.__name__} | _checked(manager, module, op)
        if ops:
            return


def _checked(manager: KernelManager, module: nn.Module, op: str) -> dict[str, Any]:
    called = Called(module)
    try:
        called.give_inputs()
    except RuntimeError as error:
        record = planned(manager, called) | {"status": "not run", "why": str(error)}
    else:
        record = compared(manager, called, [CALL])
    own = [s for s in record.pop("sites") if (s["op"], s["class"]) == (op, type(module).__name__)]
    record.pop("planning")
    fused = any(site["fused"] for site in own)
    if record["status"] == "checked" and not fused:
        record["status"] = "nothing fused"  # except in modules that it calls
    return record | {"fused": fused, "answer": _answer(own)}


def _answer(sites: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(sorted({site["variant"] if site["fused"] else site["why"] for site in sites}))


def instances(cls: type[nn.Module]) -> Iterator[nn.Module]:
    """Small instances of *cls*, with values everywhere.

    The first has the required arguments only; the second also has the arguments that default to ``None``.
    """
    choices = [_arguments(cls, every) for every in (False, True)]
    for arguments in choices[: 1 + (choices[0] != choices[1])]:
        try:
            with torch.device("meta"):
                if sum(1 for _ in cls(**arguments).modules()) > MOST_MODULES:
                    continue  # a whole model, or a block of one
            torch.manual_seed(0)
            module = cls(**arguments)
            give_values(module)
            yield module.eval().float()
        except Exception:  # most classes are no norms, and need arguments that are not made here
            continue


def _arguments(cls: type[nn.Module], every: bool) -> dict[str, Any]:
    _, *parameters = inspect.signature(cls.__init__).parameters.values()
    found = {}
    for each in parameters:
        named = each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        if named and (each.default is each.empty or (every and each.default is None)):
            found[each.name] = next((value for name, value in _ARGUMENTS if re.fullmatch(name, each.name)), None)
    return {name: value for name, value in found.items() if value is not None}


def model_record(manager: KernelManager, library: str, name: str) -> dict[str, Any]:
    """The record of one model: for each class, how many sites it has and how many of them are fused."""
    record: dict[str, Any] = {"library": library, "model": name}
    try:
        model = built(library, name)
    except Exception as error:
        return record | {"status": "not built", "why": said(error)}
    report = manager.plan(model).report
    sites = Counter(_site(model, report))
    return record | {"status": "planned", "sites": [dict(site) | {"count": n} for site, n in sites.items()]}


def _site(model: nn.Module, report: Report) -> Iterator[tuple[tuple[str, Any], ...]]:
    for entry in report.entries:
        cls = type(model.get_submodule(entry.paths[0]))
        if entry.op in OPS:
            fused = bool(entry.fused or entry.covered_by)
            why = (entry.variant or "part of what is fused") if fused else entry.why_not
            site = {"op": entry.op, "module": cls.__module__, "class": cls.__name__, "fused": fused, "answer": why}
            yield tuple(site.items())


def built(library: str, name: str) -> nn.Module:
    """A small model without pretrained weights.

    Raises:
        Exception: Whatever its constructor raises; a `ValueError` if it has more than `LARGEST` parameters.
    """
    if library == "timm":
        import timm

        make: Callable[[], nn.Module] = functools.partial(timm.create_model, name, pretrained=False, **_TIMM[name])
    else:
        import diffusers

        cls = getattr(diffusers, name)
        make = functools.partial(cls, **_small(cls) | _DIFFUSERS[name])
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make().parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters, though small")
    torch.manual_seed(0)
    return make().eval()


def _small(cls: type[nn.Module]) -> dict[str, Any]:
    found = {}
    for each in inspect.signature(cls.__init__).parameters.values():
        most = next((number for name, number in _SMALL if re.fullmatch(name, each.name)), None)
        if type(each.default) is int and most is not None and each.default > most:
            found[each.name] = most
        elif isinstance(each.default, tuple) and re.fullmatch(r".*(out_channels|embed_dims?)", each.name):
            found[each.name] = tuple(min(number, WIDTH) for number in each.default)
    return found


if __name__ == "__main__":
    main()
