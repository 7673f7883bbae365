"""Says what Liger does not compute, and why. It does not import Liger, which only another machine may have."""

from __future__ import annotations

from fuseplug import Adapter
from fuseplug_backends.activations import ACTIVATIONS
from fuseplug_rmsnorm import reference as rmsnorm
from fuseplug_rmsnorm.recognise.adapters import NormAdapter
from fuseplug_rope import reference as rope
from fuseplug_rope.recognise.adapters import ConformerAdapter, MethodAdapter, RotaryAdapter
from fuseplug_rope.recognise.modules import ModuleAdapter
from fuseplug_swiglu import reference as swiglu
from fuseplug_swiglu.recognise.adapters import GatedAdapter


def of_rmsnorm(adapter: Adapter) -> str | None:
    """Return why Liger's RMSNorm does not compute the calls of *adapter*; ``None`` if it does."""
    if not isinstance(adapter, NormAdapter):
        return None
    variant = rmsnorm.VARIANTS[adapter.variant]
    if variant.gate is not None or adapter.gated:
        return "Liger's RMSNorm takes no gate"
    if adapter.group_size is not None or adapter.groups is not None:
        return "Liger's RMSNorm normalises whole rows, and this module normalises groups of neighbours"
    if variant.weight == "input":
        return "Liger's RMSNorm multiplies by the weight after it has normalised, and this module before"
    return None


def of_swiglu(adapter: Adapter) -> str | None:
    """Return why Liger's SwiGLU and GeGLU do not compute the calls of *adapter*; ``None`` if one does."""
    if not isinstance(adapter, GatedAdapter):
        return None
    steep = "beta" in dict(adapter.numbers)
    return other_activation(adapter.activation, 2.0 if steep else 1.0) or other_variant(
        adapter.form, adapter.activation
    )


def other_activation(name: str, beta: float) -> str | None:
    """Return why Liger does not compute the activation with this *name* and *beta*; ``None`` if it does."""
    activation = ACTIVATIONS[name]
    if activation.formula == "gelu":
        return "Liger's GeGLU is the approximation by tanh, and this module computes the exact gelu"
    if activation.formula == "gelu_tanh":
        return None
    if activation.formula != "swish":
        return f"Liger has a gated silu and a gated gelu, and no {name}"
    if activation.steepness(beta) != 1:
        return "Liger's SwiGLU is x · sigmoid(x), and this module's sigmoid has another steepness"
    return None


def other_variant(form: str, activation: str) -> str | None:
    """Return why Liger does not compute this variant with this activation; ``None`` if it does."""
    variant = swiglu.VARIANTS[form]
    if variant.scaled and ACTIVATIONS[activation].formula == "swish":
        return None
    if variant.scaled:
        return "Liger's GeGLU does not scale the gate, and this module does"
    if variant.wide:
        return "Liger rounds the activated gate, and this module computes in float32 up to the product"
    if variant.simple:
        return None
    what = "clamps gate and up" if variant.clamp else "keeps a part of each row only"
    return f"this module {what}, and Liger does not"


def of_rope(adapter: Adapter) -> str | None:
    """Return why Liger's RoPE does not compute the calls of *adapter*; ``None`` if it does."""
    if isinstance(adapter, MethodAdapter):
        adapter = adapter.function
    if isinstance(adapter, RotaryAdapter | ConformerAdapter | ModuleAdapter):
        variant = rope.VARIANTS[adapter.variant]
        if variant.reads == "pairs":
            return "Liger's RoPE rotates one half of a head against the other, and this one pairs of neighbours"
        if variant.width == "trailing":
            return "Liger's RoPE rotates the first elements of a head, and this one the last"
    if isinstance(adapter, ConformerAdapter | ModuleAdapter):
        return _ALONE
    if isinstance(adapter, RotaryAdapter):
        return _other_call(adapter)
    return None


_ALONE = "Liger's RoPE rotates a q and a k together, and this one rotates one tensor at a time"


def _other_call(adapter: RotaryAdapter) -> str | None:
    if len(adapter.roles.rotated) != 2 or adapter.alignment == "first":
        return _ALONE
    if rope.VARIANTS[adapter.variant].table == "full" and (adapter.gathers or adapter.roles.sections is not None):
        return (
            "Liger's RoPE reads one half of the tables, and this one makes new tables at each call: to compare "
            "both halves, the host would wait for the device each time"
        )
    return None
