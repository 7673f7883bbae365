"""The kernels as an experts implementation of transformers: ``model.set_experts_implementation("fuseplug")``.

Nothing is checked when a model is given this implementation. So a kernel computes only what transformers itself says
about its experts, and transformers' own ``grouped_mm`` computes everything else.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from fuseplug_backends.tracing import are_modules_hooked

from .functional import KERNELS, moe
from .kernels import STACKED_GAINS_FROM, InductorMoEKernel, MoEKernel
from .recognise.calls import PLAIN
from .recognise.gates import named_activation, own_gate
from .recognise.indices import PARALLEL, names_experts
from .reference import GateUpLayout, RowFunction, apply_gate

__all__ = ["register_experts"]

_NAMING = ("torch.nn.modules.activation", "torch.nn.functional", "transformers.activations")
"""The Python modules whose activations, if in `GATES`, do the same in every call, in training as in eval mode."""

_SAME_AS_USUAL = "grouped_mm"
"""The implementation that transformers uses by default."""


def register_experts(name: str = "fuseplug", *, every_size: bool = False) -> str:
    """Register the kernels of this package with transformers, for ``model.set_experts_implementation(name)``.

    The kernel is the one for the device of the call, as for `fuseplug_moe.moe`. transformers' own ``grouped_mm``
    computes calls inside ``torch.compile``, calls that are too small to gain, and, with a `RuntimeWarning` that says
    why, calls that no kernel here computes: on a device without a kernel, or with weights that are not plain tensors.

    Args:
        name: The name of the implementation.
        every_size: Use the kernels in calls of every size, as in `fuseplug.KernelManager`.

    Returns:
        *name*.

    Raises:
        ImportError: If transformers is not installed, or too old to have experts implementations.
        ValueError: If transformers, or somebody else, already has an implementation of that name.
    """
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError as error:
        raise ImportError(
            "register_experts needs a transformers that has experts implementations (5.0 or newer): "
            'pip install "transformers>=5". In older ones use fuseplug.manager.apply_all(model)'
        ) from error
    registered = ALL_EXPERTS_FUNCTIONS.get(name, None)
    if name == "eager" or not (registered is None or getattr(registered, "func", None) is _experts):
        raise ValueError(
            f"transformers already has an experts implementation {name!r}, from "
            f"{getattr(registered, '__module__', 'the models themselves')}: choose another name"
        )
    usual = functools.partial(ALL_EXPERTS_FUNCTIONS.__getitem__, _SAME_AS_USUAL)
    ALL_EXPERTS_FUNCTIONS.register(name, functools.partial(_experts, usual, every_size))
    return name


def _experts(
    usual: Callable[[], Callable[..., Tensor]],
    every_size: bool,
    module: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Called by transformers: ``(tokens, hidden)`` floating, ``(tokens, k)`` integers, ``(tokens, k)`` floating.

    Raises:
        IndexError: On the CPU, if an index names neither an expert nor, in expert parallelism, those elsewhere.
    """
    if torch.compiler.is_compiling():
        return usual()(module, hidden_states, top_k_index, top_k_weights)
    kernel = _kernel(hidden_states.device.type)
    if kernel is InductorMoEKernel and not every_size and not _gains(hidden_states):
        return usual()(module, hidden_states, top_k_index, top_k_weights)
    if why := _unknown(module, hidden_states, kernel):
        message = f"{type(module).__name__}: {why}; transformers' {_SAME_AS_USUAL} computes it"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        return usual()(module, hidden_states, top_k_index, top_k_weights)
    experts: Any = module
    first, down, *biases = _weights(experts)
    if not names_experts(module, top_k_index, len(down)):
        least, most = (int(end) for end in top_k_index.aminmax())
        elsewhere = f", and {len(down)} for those on other ranks" if getattr(module, PARALLEL, False) else ""
        raise IndexError(
            f"top_k_index of {type(module).__name__} must be from 0 to {len(down) - 1}{elsewhere}; it is from {least} "
            f"to {most}: look at the router, or at num_experts"
        )
    layout: GateUpLayout = "concatenated" if experts.has_gate else "ungated"
    return moe(
        hidden_states,
        top_k_index,
        top_k_weights,
        first,
        down,
        gate_up_bias=biases[0] if biases else None,
        down_bias=biases[1] if biases else None,
        transposed=experts.is_transposed,
        layout=layout,
        activation=_gate(module, layout),
        post=experts.post_expert_norm if experts.has_post_expert_norm else None,
    )


def _gains(hidden_states: Tensor) -> bool:
    """Whether Inductor's kernel is faster than ``grouped_mm`` in this call."""
    decodes = len(hidden_states) == 1 and hidden_states.is_cpu and not torch.is_grad_enabled()
    return decodes or len(hidden_states) >= STACKED_GAINS_FROM


@functools.cache
def _kernel(device_type: str) -> type[MoEKernel] | None:
    """The kernel that `moe` uses on *device_type*."""
    able = (kernel for kernel in KERNELS if kernel().runs_on(device_type) and kernel().lacks(device_type) is None)
    return next(able, None)


def _weights(module: Any) -> list[Any]:
    """The first projection, the second, and their biases, if any, from the attributes that transformers uses."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    names = [first, "down_proj", *((f"{first}_bias", "down_proj_bias") if module.has_bias else ())]
    return [getattr(module, name) for name in names]


def _unknown(module: nn.Module, hidden_states: Tensor, kernel: type[MoEKernel] | None) -> str:
    """Why no kernel computes a call; ``""`` if one does."""
    if kernel is None:
        return f"no kernel of fuseplug-moe runs on {hidden_states.device.type} here, as `fuseplug doctor` says"
    if hidden_states.dim() != 2:
        return f"its input has {hidden_states.dim()} dimensions, not 2"
    tensors = [hidden_states, *_weights(module)]
    if odd := next((type(tensor) for tensor in tensors if type(tensor) not in PLAIN), None):
        return f"a {odd.__name__} is among its weights and its input; only plain tensors are supported"
    return ""


def _gate(module: Any, layout: GateUpLayout) -> str | RowFunction:
    """The module's gate: as a row of `GATES` if that is certain, otherwise as a function to call."""
    named = _named(module.act_fn) if layout == "ungated" or _is_default(module) else None
    return named or own_gate(module, layout)


def _is_default(module: nn.Module) -> bool:
    """Whether the gate is ``act_fn(gate) * up`` of two halves, which transformers gives to classes without a gate."""
    gate = getattr(type(module), "_apply_gate", None)
    return getattr(gate, "__module__", "") == "transformers.integrations.moe" and "_apply_gate" not in vars(module)


def _named(activation: Any) -> str | None:
    """The row of `GATES` that *activation* is, if it comes from torch or transformers."""
    if isinstance(activation, nn.Module):
        attributes = vars(activation)
        hooked = are_modules_hooked() or any(value for name, value in attributes.items() if name.endswith("hooks"))
        if hooked or "forward" in attributes or activation._parameters:
            return None
        state = tuple((name, attributes[name]) for name in attributes if name[:1] != "_" and name != "training")
    else:
        state = (("", activation),)
    try:
        if (type(activation), state) not in _names:
            _names[type(activation), state] = _name_of(activation)
    except TypeError:  # an attribute cannot be a key
        return None
    return _names[type(activation), state]


_names: dict[Any, str | None] = {}


def _name_of(activation: Any) -> str | None:
    defined = activation if isinstance(activation, FunctionType) else type(activation)
    if defined.__module__ not in _NAMING:
        return None
    name = named_activation(activation)
    # Some activations are clipped at 10, farther out than `named_activation` looks.
    far = torch.tensor([*(10.0**n for n in range(5)), *(-(10.0**n) for n in range(5))], device="cpu").repeat(2)
    same = name is not None and torch.allclose(
        activation(far), apply_gate(far, None, name, "ungated", None, 1.0), rtol=1e-5, atol=1e-6
    )
    return name if same else None
