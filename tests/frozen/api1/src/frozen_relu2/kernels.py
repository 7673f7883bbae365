"""Which kernels there are. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Literal

from fuseplug import Adapter, BaseKernel, Proposal, Rejection, Site, Use
from fuseplug_backends.inductor import InductorKernel
from fuseplug_backends.npu import NpuKernel


class ReLU2Kernel(BaseKernel):
    """The base of the kernels for ``weight * relu(x)²``, with or without a bias."""

    op: ClassVar[str] = "relu2"
    reference: ClassVar[str] = "frozen_relu2.mathematics:relu2"
    recogniser: ClassVar[str] = "frozen_relu2.recognise:match"
    specimens: ClassVar[str] = "frozen_relu2.specimens:specimens"


class HandWritten(ReLU2Kernel):
    """By a function of autograd."""

    api: ClassVar[int] = 1
    kernel_id: ClassVar[str] = "frozen_relu2"
    function: ClassVar[str] = "frozen_relu2.mathematics:fused_relu2"
    device_types: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    differentiable: ClassVar[bool] = True
    when_traced: ClassVar[Literal["kernel", "original"]] = "original"
    priority: ClassVar[int] = 1
    check_sizes: ClassVar[tuple[int, ...]] = (256, 4096)

    def unavailable(self, device_type: str) -> str | None:
        """It lacks nothing on any device."""
        return None

    def caveat(self, device_type: str) -> str | None:
        """It is right on every device."""
        return None

    def unsupported(self, adapter: Adapter) -> str | None:
        """It has no bias."""
        return "it adds no bias" if adapter.variant == "biased" else None

    def gains_from(self, use: Use) -> int:
        """From where it was measured to gain."""
        return 64 if use.gradients and use.dtype.itemsize == 4 and use.device_type == "cpu" else 128

    def gains_until(self, use: Use) -> int:
        """It gains for a single row of 16, too."""
        return 16 if use.gradients else 0


class Compiled(InductorKernel, ReLU2Kernel):
    """As Inductor compiles it."""

    kernel_id: ClassVar[str] = "frozen_relu2_inductor"
    function: ClassVar[str] = "frozen_relu2.mathematics:compiled_relu2"


class OnNpu(NpuKernel, ReLU2Kernel):
    """By operations of torch_npu."""

    kernel_id: ClassVar[str] = "frozen_relu2_npu"
    function: ClassVar[str] = "frozen_relu2.mathematics:relu2"
    ops: ClassVar[tuple[str, ...]] = ("npu_relu2",)


class SoftCap(BaseKernel):
    """A function that a method looks up."""

    kernel_id: ClassVar[str] = "frozen_soft_cap"
    op: ClassVar[str] = "soft_cap"
    reference: ClassVar[str] = "frozen_relu2.mathematics:soft_cap"
    function: ClassVar[str] = "frozen_relu2.mathematics:fused_soft_cap"

    def match(self, site: Site) -> Iterable[Proposal] | Rejection | None:
        """Recognise it by the name of the function."""
        from .recognise import match_soft_cap

        return match_soft_cap(site)


class Tail(BaseKernel):
    """A method of a module below the site, during some calls of the site only, with consent."""

    kernel_id: ClassVar[str] = "frozen_tail"
    op: ClassVar[str] = "tail"
    reference: ClassVar[str] = "frozen_relu2.mathematics:linear"
    function: ClassVar[str] = "frozen_relu2.mathematics:fused_linear"

    def match(self, site: Site) -> Iterable[Proposal] | Rejection | None:
        """Recognise a model with a tail."""
        from .recognise import match_tail

        return match_tail(site)


class Doubled(BaseKernel):
    """Two methods of one module, the one of which no longer calls a child."""

    kernel_id: ClassVar[str] = "frozen_doubled"
    op: ClassVar[str] = "doubled"
    reference: ClassVar[str] = "frozen_relu2.mathematics:doubled"
    function: ClassVar[str] = "frozen_relu2.mathematics:fused_doubled"
    recogniser: ClassVar[str] = "frozen_relu2.recognise:match_doubled"
