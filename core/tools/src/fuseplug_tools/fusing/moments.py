"""The moments at which a model is fused: before a library prepares it, or when its training, or its use, begins.

Importing this module imports no torch.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..run.options import ACCELERATE, FSDP1, LLAMA_FACTORY, TRANSFORMERS


def wrap(name: str, module: ModuleType) -> None:
    """Wrap the functions of interest in *module*, which was just imported as *name*."""
    _WRAPS[name](module)


def _transformers(module: ModuleType) -> None:
    import torch
    from torch import nn

    from .process import fusing

    def watch(self: Any, *_args: Any, **_kwargs: Any) -> None:
        fusing().watch(self)

    def replicate(_self: Any, module: Any, *_args: Any, **_kwargs: Any) -> None:
        fusing().fuse_watched(module)

    def compile_model(model: Any = None, *_args: Any, **_kwargs: Any) -> None:
        model = getattr(model, "__self__", model)  # Module.compile() compiles a method
        trained = torch.is_grad_enabled() and not _accelerate_prepares()
        if isinstance(model, nn.Module) and (trained or fusing().serves):
            fusing().fuse_watched(model)

    _wrap(module.PreTrainedModel, "__init__", watch, first=False)
    # Here the first call of the model is too late: replicas have no parameters, and a compiler traces the call.
    _wrap(nn.DataParallel, "__init__", replicate)
    _wrap(torch, "compile", compile_model)


def _accelerate(module: ModuleType) -> None:
    from torch import nn

    from .process import fusing

    def prepare(self: Any, *objects: Any, **_kwargs: Any) -> None:
        for model in objects:
            if isinstance(model, nn.Module):
                fusing().fuse(model, self.device)

    def prepare_model(self: Any, model: Any, _placed: Any = None, evaluation_mode: bool = False, **_kw: Any) -> None:
        # Reference models are prepared for evaluation. So is a model that was sharded while it was loaded and is
        # trained afterwards; its first forward is early enough to fuse it.
        if not evaluation_mode or fusing().serves:
            fusing().fuse(model, self.device)

    _wrap(module.Accelerator, "prepare", prepare)
    _wrap(module.Accelerator, "prepare_model", prepare_model)


def _fsdp1(module: ModuleType) -> None:
    from .process import fusing

    def shard(_self: Any, module: Any, *_args: Any, device_id: Any = None, **_kwargs: Any) -> None:
        if not _accelerate_prepares():
            fusing().fuse(fusing().outermost(module), _device(device_id))

    _wrap(module.FullyShardedDataParallel, "__init__", shard)


def _llama_factory(module: ModuleType) -> None:
    from .process import fusing

    def choose(model: Any, include_kernels: str | bool | None = None) -> Any:
        fusing().choose(model, include_kernels)
        return model

    # Replaces "auto", which applies LLaMA-Factory's kernels: Fuseplug would leave alone what these patch.
    for name in ("auto", "fuseplug"):
        module.KernelPlugin(name).register()(choose)


def _accelerate_prepares() -> bool:
    """Whether accelerate is in use. Then it prepares trained models, and other wrapped models are references."""
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.is_initialized())


def _device(device_id: Any) -> Any:
    import torch

    if not isinstance(device_id, int):
        return device_id
    here = torch.accelerator.current_accelerator()
    return None if here is None else torch.device(here.type, device_id)


def _wrap(owner: Any, name: str, step: Callable[..., None], *, first: bool = True) -> None:
    """Call *step* with the arguments of each call of *owner*'s function *name*, before or after that call."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if first:
            step(*args, **kwargs)
        result = original(*args, **kwargs)
        if not first:
            step(*args, **kwargs)
        return result

    setattr(owner, name, wrapper)


_WRAPS = {TRANSFORMERS: _transformers, ACCELERATE: _accelerate, FSDP1: _fsdp1, LLAMA_FACTORY: _llama_factory}
