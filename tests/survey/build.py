"""A small model of any model type, always with the same weights."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from .small_configs import small_config

_FIRST = ("IMAGE_TEXT_TO_TEXT", "CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "SEQ_TO_SEQ_CAUSAL_LM", "TEXT_TO_WAVEFORM")
_MAPPINGS = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _FIRST] + ["MODEL_MAPPING_NAMES"]
_MAPPINGS += sorted(name for name in vars(modeling_auto) if name.startswith("MODEL_FOR_") and name.endswith("_NAMES"))


LARGEST = 50_000_000
"""A model with more parameters is not built."""


class NoModel(Exception):
    """Raised for a config from which transformers builds no model by itself."""


def build(model_type: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model of *model_type*, in eval mode.

    Raises:
        NoModel: If there is none.
        Exception: Whatever config and model raise.
    """
    config_class = CONFIG_MAPPING[model_type]
    model_class = next(model_classes(model_type, config_class), None)
    if model_class is None:
        raise NoModel(f"no model is built from {config_class.__name__} by itself")
    return of_class(model_class, small_config(config_class), dtype)


def of_class(
    model_class: type[PreTrainedModel], config: PretrainedConfig | None = None, dtype: torch.dtype = torch.float32
) -> nn.Module:
    """A *model_class* in eval mode, from *config*, or by default from a small config of its own class.

    Raises:
        Exception: Whatever config and model raise; a `ValueError` if it has more than `LARGEST` parameters.
    """
    config = small_config(model_class.config_class) if config is None else config
    size = _size(model_class, config)
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters, though small: overrides.py can make it smaller")
    torch.manual_seed(0)
    model: nn.Module = model_class._from_config(config)
    give_values(model)
    return model.eval().to(dtype)


def _size(model_class: type[PreTrainedModel], config: PretrainedConfig) -> int:
    """How many parameters the model would have; 0 where it cannot be built without memory."""
    try:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in model_class(copy.deepcopy(config)).parameters())
    except Exception:
        return 0


def model_classes(model_type: str, config_class: type[PretrainedConfig]) -> Iterator[type[PreTrainedModel]]:
    """The classes that transformers builds for *model_type*, whole models first, then others that take its config."""
    module = importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))
    for mapping in _MAPPINGS:
        names = getattr(modeling_auto, mapping, {}).get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            found = getattr(transformers, name, None) or getattr(module, name, None)
            if found is not None and _takes(found, config_class):
                yield found
    for found in vars(module).values():
        own = inspect.isclass(found) and issubclass(found, PreTrainedModel) and found.__module__ == module.__name__
        if own and found.forward is not nn.Module.forward and _takes(found, config_class):
            yield found


def _takes(model_class: type[PreTrainedModel], config_class: type[PretrainedConfig]) -> bool:
    """Whether *model_class* is built from a *config_class*, and not only with one for a part of it."""
    return model_class.config_class is None or issubclass(config_class, model_class.config_class)


def give_values(model: nn.Module) -> None:
    """Put random numbers in place of ones, zeros and whatever memory holds, which would hide what is done with them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if (
                not parameter.isfinite().all()
                or (parameter.dim() > 1 and not parameter.any())
                or parameter.abs().max() > 1e3
            ):
                parameter.copy_(0.05 * noise)
            elif parameter.dim() < 2:
                parameter.add_(0.1 * noise)
