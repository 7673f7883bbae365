"""Code shared by kernels that Inductor compiles. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuseplug.lazy import lazy

from .kernel import InductorKernel

if TYPE_CHECKING:
    from ..differentiating import differentiated_again, recording, vjp
    from ..torch_private import has_onednn_linear, onednn_linear
    from .compiled import Compiled, plain, plain_floating, standard_state, worth_compiling
    from .layout import keeping_order
    from .linear import CompiledLinear
    from .program import Program

__all__ = [
    "Compiled",
    "CompiledLinear",
    "InductorKernel",
    "Program",
    "differentiated_again",
    "has_onednn_linear",
    "keeping_order",
    "onednn_linear",
    "plain",
    "plain_floating",
    "recording",
    "standard_state",
    "vjp",
    "worth_compiling",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        **dict.fromkeys(("Compiled", "plain", "plain_floating", "standard_state", "worth_compiling"), ".compiled"),
        **dict.fromkeys(("differentiated_again", "recording", "vjp"), "..differentiating"),
        "CompiledLinear": ".linear",
        **dict.fromkeys(("has_onednn_linear", "onednn_linear"), "..torch_private"),
        "Program": ".program",
        "keeping_order": ".layout",
    },
)
