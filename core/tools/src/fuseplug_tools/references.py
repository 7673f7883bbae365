"""Functions that transformers computes in PyTorch unless a package is installed, and packages that are faster."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fuseplug import called_functions

if TYPE_CHECKING:
    from torch import nn

    from fuseplug import Report


class ReferenceFunctions(NamedTuple):
    """Functions in transformers' model files that ``use_kernel_func_from_hub_with_fallback`` decorates.

    Attributes:
        names: Their names.
        distribution: The distribution of Fuseplug whose kernels replace them.
        devices: The device types of these kernels.
        package: The package that transformers calls instead, on any device, if it can import `module`.
        module: The name under which the package is imported.
        package_devices: The device types of the package's kernels.
    """

    names: tuple[str, ...]
    distribution: str
    devices: tuple[str, ...]
    package: str
    module: str
    package_devices: tuple[str, ...]

    def remedy(self, device: str) -> str | None:
        """The package to install for models on *device*; ``None`` if none is missing or none has kernels for it."""
        if _importable(self.module):
            return None
        if device in self.devices:
            return None if _importable(self.distribution.replace("-", "_")) else self.distribution
        return self.package if device in self.package_devices else None


REFERENCE_FUNCTIONS = (
    ReferenceFunctions(
        (
            "torch_chunk_gated_delta_rule",
            "torch_recurrent_gated_delta_rule",
            "chunk_kimi_delta_attention",
            "recurrent_kimi_delta_attention",
        ),
        "fuseplug-gated-delta-rule",
        ("cpu", "npu"),
        "flash-linear-attention",
        "fla",
        ("cuda", "xpu", "npu"),
    ),
    ReferenceFunctions(
        ("causal_conv1d_fn", "causal_conv1d_update"),
        "fuseplug-causal-conv1d",
        ("cpu",),
        "causal-conv1d",
        "causal_conv1d",
        ("cuda",),
    ),
    ReferenceFunctions(
        ("mamba_selective_scan", "mamba_selective_state_update"),
        "fuseplug-selective-scan",
        ("cpu",),
        "mamba-ssm",
        "mamba_ssm",
        ("cuda",),
    ),
    ReferenceFunctions(
        ("mamba2_chunk_scan", "mamba2_selective_state_update"),
        "fuseplug-ssd",
        ("cpu", "npu"),
        "mamba-ssm",
        "mamba_ssm",
        ("cuda",),
    ),
)
"""All such functions of transformers 5.24 that kernels of Fuseplug replace."""


def notes(model: nn.Module, report: Report) -> Iterator[str]:
    """Yield a sentence for each class of *model* and each row of `REFERENCE_FUNCTIONS` that it calls in PyTorch.

    A row counts only if a package can be installed for it, for a device that *report* plans for.
    """
    classes = dict.fromkeys(map(type, model.modules()))
    for functions in REFERENCE_FUNCTIONS:
        for device in report.device_types:
            if remedy := functions.remedy(device):
                for cls in classes:
                    if called := _called(cls, functions.names):
                        yield (
                            f"{cls.__name__} runs transformers' reference implementation of {' and '.join(called)}, in "
                            f"PyTorch; {remedy}, which is not installed, has kernels for {device}: pip install {remedy}"
                        )


def to_install(devices: Sequence[str]) -> list[str]:
    """The packages to install for models on one of *devices*."""
    return list(dict.fromkeys(name for row in REFERENCE_FUNCTIONS for kind in devices if (name := row.remedy(kind))))


def _called(cls: type, names: Sequence[str]) -> list[str]:
    def is_reference(value: object) -> bool:
        module = str(getattr(value, "__module__", ""))
        return getattr(value, "__name__", "") in names and module.startswith("transformers.models.")

    return [*called_functions(cls.forward, is_reference)]  # type: ignore[attr-defined]  # modules have one


def _importable(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
