"""Kernels for NPUs. Nothing here imports torch."""

from fuseplug_backends.npu import NpuKernel

from .kernels import Gated


class NpuGated(NpuKernel, Gated):
    """silu(gate) * up of the halves of a tensor, by an operation of torch_npu."""

    kernel_id = "zoo_npu_gated"
    function = "conformance.zoo.npu_ops:gated"
    ops = ("npu_swiglu",)


class CarelessNpuGated(NpuGated):
    """The same, but it ignores the operation's limits."""

    function = "conformance.zoo.npu_ops:carelessly_gated"
