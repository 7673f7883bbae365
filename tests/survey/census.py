"""Which classes and functions of transformers compute one of the ops, and which of them got an answer.

`classes.json` lists them by release, op and folder of ``transformers.models``, as read from the source of every
modeling file: a class is listed if its forward has the arithmetic of the op, whatever its name. For rotations, the file
lists functions, and under ``rope_calls`` the classes that call them. For the loss of a head, it lists the models whose
forward takes labels, and calls the output embeddings and a loss. For causal convolutions, gated delta rules, selective
scans and chunk scans, it lists the mixers that call a function which transformers 5.24 has for the op, and the same
classes of older releases.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig

from fuseplug import Entry, Report

LOSS = "linear_cross_entropy"
OPS = ("rmsnorm", "swiglu", "rope", "moe", LOSS, "causal_conv1d", "gated_delta_rule", "selective_scan", "ssd")
_FILE = Path(__file__).with_name("classes.json")


@dataclass(frozen=True)
class Census:
    """The classes of one release.

    Attributes:
        classes: By op, the pairs of folder and name of each class, or for ``"rope"``, of each function.
        calls: The pairs of folder and name of each class that calls a rotation, with the names of the functions called.
    """

    classes: Mapping[str, frozenset[tuple[str, str]]]
    calls: Mapping[tuple[str, str], frozenset[str]]

    @classmethod
    def of(cls, release: str = transformers.__version__) -> Census:
        """The census of *release*, which is the installed one by default.

        Raises:
            KeyError: If *release* has no census.
        """
        found = json.loads(_FILE.read_text())[release]
        classes = {op: frozenset((d, n) for d, names in found[op].items() for n in names) for op in OPS}
        calls: dict[tuple[str, str], set[str]] = {}
        for folder, functions in found["rope_calls"].items():
            for function, callers in functions.items():
                for caller in callers:
                    # A method is named with its class where it is defined.
                    name = function.replace("self.", f"{caller}.")
                    calls.setdefault((folder, caller), set()).add(name)
        return cls(classes, {caller: frozenset(functions) for caller, functions in calls.items()})

    def ops_of(self, module: nn.Module) -> set[str]:
        """The ops that *module* itself computes or, for rotations, calls."""
        where = located(type(module))
        ops = {op for op in OPS if op != "rope" and where in self.classes[op]}
        return ops | ({"rope"} if where in self.calls else set())

    def keys(self, site: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
        """The entries of the census that the record of a site is about: op, folder, and class or function name."""
        op, folder, name = site["op"], site["folder"], site["class"]
        if op == "rope":
            method, _, function = site["target"].partition(":")
            names = {function, f"{name}.{method}", *site.get("calls", ())}
            names |= set() if site["target"] else self.calls.get((folder, name), set())
        else:
            names = {name}
        yield from ((op, folder, each) for each in sorted(names) if (folder, each) in self.classes[op])

    def concerns(self, config_class: type[PretrainedConfig]) -> bool:
        """Whether *config_class*, or a config within it, is written in a folder with classes that compute an op."""
        folders = {folder for op in OPS for folder, _ in self.classes[op]}
        # Configs with backbones know only from an instance which configs are within.
        within = config_class.sub_configs if isinstance(config_class.sub_configs, dict) else {}
        return located(config_class)[0] in folders or any(
            issubclass(each, PretrainedConfig) and each is not config_class and self.concerns(each)
            for each in within.values()
        )

    def unanswered(self, model: nn.Module, report: Report) -> list[dict[str, str]]:
        """The classes in *model* that compute an op, but about which *report* says nothing, each once."""
        answered = {(path, op) for entry in report.entries for op in ops_of(entry, report) for path in entry.paths}
        silent = {}
        for path, module in model.named_modules():
            for op in self.ops_of(module):
                if (path, op) not in answered:
                    where = located(type(module))
                    silent[op, where] = {"op": op, "folder": where[0], "class": where[1], "target": "", "path": path}
        return list(silent.values())


def ops_of(entry: Entry, report: Report) -> list[str]:
    """The ops that *entry* answers for: several if no kernel proposed anything and kernels of several ops said why."""
    ops = {record.kernel_id: record.kernel.op for record in report.records if record.kernel}
    said = [ops[kernel] for kernel, _ in entry.rejections if entry.target is None and kernel in ops]
    return list(dict.fromkeys([entry.op, *said]))


def located(cls: type) -> tuple[str, str]:
    """The folder of ``transformers.models`` in which *cls* is written, and the name of *cls*."""
    parts = cls.__module__.split(".")
    return (parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else "", cls.__name__)
