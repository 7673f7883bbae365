"""Builds a model from its config alone: its modules as they will be, on meta or with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..report.plain_text import one_line

if TYPE_CHECKING:
    from torch import nn


def build(name: str, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model that *name* stands for, on meta, in the dtype that its config says.

    Args:
        name: The path of a ``config.json``, a directory with one, or the id of a model on the Hugging Face Hub.
        trust_remote_code: Whether Python code that comes with the model may be run.

    Raises:
        PlanError: If there is no such model, its config is invalid, or a library that builds it is not installed.
    """
    config = config_of(name, trust_remote_code=trust_remote_code)
    return model_of(config, name, device="meta", trust_remote_code=trust_remote_code)


def model_of(config: Any, name: str, *, device: str, trust_remote_code: bool = False) -> nn.Module:
    """Build the model of *config* on *device*, in the dtype that *config* says. Errors call the model *name*."""
    torch, transformers = _torch(), _transformers()
    try:
        with torch.device(device):
            return _from_config(transformers, config, trust_remote_code)
    except ImportError as error:
        raise PlanError(f"{name} cannot be built: {_first_line(error)}", name=name) from error
    except Exception as error:  # with wrong types or sizes in the config, the model's code may raise anything
        raise PlanError(
            f"{name} cannot be built: {type(error).__name__}: {_first_line(error)}; expected the config of a model "
            "that transformers can build: look at its sizes and types",
            name=name,
        ) from error


def with_random_weights(config: Any, name: str, *, device: str, trust_remote_code: bool = False) -> nn.Module:
    """Build a model as `model_of` does, all of it on *device*, with weights that are random but always the same."""
    torch = _torch()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_of(config, name, device=device, trust_remote_code=trust_remote_code)
    return model.to(device=device)


def config_of(name: str, *, trust_remote_code: bool = False) -> Any:
    """The config that *name* stands for. *name* and the errors are as in `build`."""
    _must_exist(name)
    _torch()  # first, because its import may fail in a vendor's code, and transformers would hide that
    transformers = _transformers()
    # With None instead of False, transformers would ask on the terminal whether to run the model's code.
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # for a file that is no config, transformers may raise anything
        raise PlanError(
            f"the config of {name} cannot be read: {_first_line(error)}\n{_remedy(name, error)}", name=name
        ) from error


def config_of_type(model_type: str, values: Mapping[str, Any]) -> Any:
    """The config of *model_type*, with *values* in place of its defaults."""
    return _transformers().AutoConfig.for_model(model_type, **values)


def _must_exist(name: str) -> None:
    path = Path(name)
    if path.is_dir() and not (path / "config.json").is_file():
        raise PlanError(f"{name} is a directory without config.json: name one that holds a model", name=name)
    local = path.is_absolute() or name.startswith((".", "~")) or name.endswith(".json") or name.count("/") > 1
    if local and not path.exists():
        raise PlanError(
            f"{name} does not exist: expected the path of a config.json, a model's directory, or a Hub id", name=name
        )


def _torch() -> Any:
    try:
        import torch
    except Exception as error:  # torch runs vendors' code on import
        raise PlanError(f"torch cannot be imported: {_first_line(error)}\n`fuseplug doctor` says more.") from error
    return torch


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise PlanError(
            'models are built with transformers, which is not installed: pip install "fuseplug[transformers]"'
        ) from error
    return transformers


def _from_config(transformers: Any, config: Any, trust_remote_code: bool) -> nn.Module:
    for name in config.architectures or ():
        architecture = getattr(transformers, name, None)
        if architecture is not None and getattr(architecture, "config_class", None) is type(config):
            model: nn.Module = architecture._from_config(config)
            return model
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError:  # not a language model
        model = transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    return model


def _remedy(name: str, error: Exception) -> str:
    message = str(error)
    if "trust_remote_code" in message:
        return "If you trust the code that comes with the model, add --trust-remote-code."
    if "valid JSON" in message:
        return "Correct it, or download it again."
    if Path(name).exists():
        return "If the model is newer than the installed transformers: pip install --upgrade transformers"
    if "gated" in message or "401" in message or "403" in message:
        return "If the model is private or gated, log in with `hf auth login`."
    absent = f"There is no {name} here, so the Hub was asked. "
    return f"{absent}Without the network, name a downloaded directory or config.json instead."


def _first_line(error: Exception) -> str:
    lines = [line for line in map(one_line, str(error).splitlines()) if line] or [type(error).__name__]
    # Some messages say on the first line that something is wrong, and on the second what it is.
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])
