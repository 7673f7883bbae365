"""The public names of Fuseplug, and the private names that a package uses. Importing this module does nothing.

A name is public if it is in the ``__all__`` of one of `MODULES`. ``docs/compatibility.md`` lists the same names, and a
test compares the two.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODULES = (
    "fuseplug",
    "fuseplug.fallback",
    "fuseplug.interface",
    "fuseplug.lazy",
    "fuseplug.process_lock",
    "fuseplug.reading",
    "fuseplug_backends.activations",
    "fuseplug_backends.differentiating",
    "fuseplug_backends.dtypes",
    "fuseplug_backends.functional",
    "fuseplug_backends.inductor",
    "fuseplug_backends.looked_up",
    "fuseplug_backends.npu",
    "fuseplug_backends.products",
    "fuseplug_backends.tracing",
    "fuseplug_backends.triton",
    "fuseplug_causal_conv1d",
    "fuseplug_causal_conv1d.kernels",
    "fuseplug_causal_conv1d.reference",
    "fuseplug_causal_conv1d.specimens",
    "fuseplug_gated_delta_rule",
    "fuseplug_gated_delta_rule.kernels",
    "fuseplug_gated_delta_rule.reference",
    "fuseplug_gated_delta_rule.specimens",
    "fuseplug_host_npu",
    "fuseplug_liger",
    "fuseplug_linear_cross_entropy",
    "fuseplug_linear_cross_entropy.kernels",
    "fuseplug_linear_cross_entropy.lazy_tensor",
    "fuseplug_linear_cross_entropy.reference",
    "fuseplug_linear_cross_entropy.specimens",
    "fuseplug_moe",
    "fuseplug_moe.for_transformers",
    "fuseplug_moe.kernels",
    "fuseplug_moe.reference",
    "fuseplug_moe.specimens",
    "fuseplug_rmsnorm",
    "fuseplug_rmsnorm.kernels",
    "fuseplug_rmsnorm.reference",
    "fuseplug_rmsnorm.specimens",
    "fuseplug_rope",
    "fuseplug_rope.kernels",
    "fuseplug_rope.reference",
    "fuseplug_rope.specimens",
    "fuseplug_selective_scan",
    "fuseplug_selective_scan.kernels",
    "fuseplug_selective_scan.reference",
    "fuseplug_selective_scan.specimens",
    "fuseplug_ssd",
    "fuseplug_ssd.kernels",
    "fuseplug_ssd.reference",
    "fuseplug_ssd.specimens",
    "fuseplug_swiglu",
    "fuseplug_swiglu.kernels",
    "fuseplug_swiglu.reference",
    "fuseplug_swiglu.specimens",
    "fuseplug_testing",
    "fuseplug_testing.triton",
    "fuseplug_tools.integrations.heads",
    "fuseplug_tools.integrations.kernelize",
    "fuseplug_tools.integrations.transformers",
)
"""The modules that have public names. Every other module is private, or is not Fuseplug's."""

OURS = frozenset(module.partition(".")[0] for module in MODULES)
"""The packages of this project. They are released together, and may use each other's private names."""

_NAMESPACES = frozenset({"fuseplug_tools.integrations"})
"""Packages that are private, but contain public modules."""


_EVERY_KERNEL = "fuseplug.interface"
"""Has, besides its ``__all__``, the class of every installed kernel, of any distribution."""


class Private(NamedTuple):
    """A private name of Fuseplug that a module uses.

    Attributes:
        line: The line of the use.
        module: The module that the name is taken from.
        name: The name; ``""`` if the module itself is imported.
    """

    line: int
    module: str
    name: str

    def __str__(self) -> str:
        """The name, and what to import instead."""
        homes = [module for module in MODULES if self.name and self.name in names(module)]
        remedy = f"import {self.name} from {homes[0]}" if homes else "docs/compatibility.md lists what is public"
        what = f"{self.name} of {self.module}" if self.name else self.module
        return f"{what} is private to Fuseplug, and may change in any release: {remedy}"


@functools.cache
def names(module: str) -> frozenset[str]:
    """The public names of *module*, read without an import; none if it is not installed, or not public."""
    try:
        spec = importlib.util.find_spec(module) if module in MODULES else None
    except ModuleNotFoundError:  # its distribution is not here
        spec = None
    if spec is None or spec.origin is None:
        return frozenset()
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


def private_names(source: str) -> list[Private]:
    """The private names of Fuseplug that the module with the text *source* imports, or reaches by attributes.

    Raises:
        SyntaxError: If *source* is not Python.
    """
    visitor = _Visitor(ast.parse(source))
    return sorted(set(visitor.found))


def used_by(module: str) -> Iterator[str]:
    """Say which private names of Fuseplug the package of *module* uses: file, line, and what to do.

    Modules that are in no package, and packages of this project, may use any name.
    """
    parts = module.split(".")
    if parts[0] in OURS:
        return
    for length in range(1, len(parts) + 1):
        try:
            spec = importlib.util.find_spec(".".join(parts[:length]))
        except ValueError:  # a module that nothing imported: a notebook, a script
            return
        if spec is not None and spec.origin is not None and spec.submodule_search_locations:
            break
    else:
        return
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*.py")):
            for found in private_names(path.read_text(encoding="utf-8")):
                yield f"{path.relative_to(Path(folder).parent)}:{found.line}: {found}"


class _Visitor(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.found: list[Private] = []
        self._modules: dict[str, str] = {}
        """The module of ours that an import has bound each name to."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                self._import_from(node, node.module or "")
        self.visit(tree)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            first = alias.name.partition(".")[0]
            if first not in OURS:
                continue
            self._modules[alias.asname or first] = alias.name if alias.asname else first
            if alias.name not in MODULES:
                self.found.append(Private(node.lineno, alias.name, ""))

    def _import_from(self, node: ast.ImportFrom, module: str) -> None:
        for alias in node.names if module.partition(".")[0] in OURS else ():
            whole = f"{module}.{alias.name}"
            if whole in MODULES:
                self._modules[alias.asname or alias.name] = whole
            elif not _is_public(module, alias.name):
                self.found.append(Private(node.lineno, module, alias.name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        chain: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            chain.insert(0, inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name):
            self.visit(inner)
            return
        module = self._modules.get(inner.id, "")
        for name in chain if module else ():
            if (whole := f"{module}.{name}") not in MODULES and whole not in _NAMESPACES:
                if not _is_public(module, name):
                    self.found.append(Private(node.lineno, module, name))
                return
            module = whole


def _is_public(module: str, name: str) -> bool:
    kernel = module == _EVERY_KERNEL and name[:1].isupper()
    return kernel or name in names(module) or (module in MODULES and name.startswith("__"))
