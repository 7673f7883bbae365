"""Which classes and functions of transformers compute one of the four ops, and which of them got an answer.

`classes.json` lists them by release, op and folder of ``transformers.models``, as read from the source of every
modeling file: what has the arithmetic of the op in its forward, whatever its name. For rotations it names functions,
and below ``rope_calls`` the classes that call them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import transformers
from torch import nn

from fuseplug import Report

OPS = ("rmsnorm", "swiglu", "rope", "moe")
_FILE = Path(__file__).with_name("classes.json")


@dataclass(frozen=True)
class Census:
    """The classes of one release.

    Attributes:
        classes: By op, the pairs of folder and name of a class, for ``"rope"`` of a function.
        calls: The pairs of folder and class that call a rotation, with the names of what they call.
    """

    classes: Mapping[str, frozenset[tuple[str, str]]]
    calls: Mapping[tuple[str, str], frozenset[str]]

    @classmethod
    def of(cls, release: str = transformers.__version__) -> Census:
        """The census of *release*, the installed one unless another is named.

        Raises:
            KeyError: If there is none.
        """
        found = json.loads(_FILE.read_text())[release]
        classes = {op: frozenset((d, n) for d, names in found[op].items() for n in names) for op in OPS}
        calls: dict[tuple[str, str], set[str]] = {}
        for folder, functions in found["rope_calls"].items():
            for function, callers in functions.items():
                for caller in callers:
                    calls.setdefault((folder, caller), set()).add(function)
        return cls(classes, {caller: frozenset(functions) for caller, functions in calls.items()})

    def ops_of(self, module: nn.Module) -> set[str]:
        """The ops that *module* itself computes or, for rotations, calls."""
        where = located(type(module))
        ops = {op for op in OPS if op != "rope" and where in self.classes[op]}
        return ops | ({"rope"} if where in self.calls else set())

    def unanswered(self, model: nn.Module, report: Report) -> list[dict[str, str]]:
        """The classes in *model* that compute an op and about which *report* says nothing, each once."""
        answered = {(path, entry.op) for entry in report.entries for path in entry.paths}
        silent = {}
        for path, module in model.named_modules():
            for op in self.ops_of(module):
                if (path, op) not in answered:
                    where = located(type(module))
                    silent[op, where] = {"op": op, "module": where[0], "class": where[1], "path": path}
        return list(silent.values())


def located(cls: type) -> tuple[str, str]:
    """The folder of ``transformers.models`` that *cls* is written in, and its name."""
    parts = cls.__module__.split(".")
    return (parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else "", cls.__name__)
