"""A mixture of experts on an NPU, computed correctly, and with each of the mistakes that people make."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.nn import functional

npu = torch.ops.npu

EPS = 1e-3
EXPERTS, HIDDEN, INNER = 4, 8, 8


def inputs(device):
    """Tokens that leave one expert idle, and experts' weights as in transformers, ``[experts, out, in]``."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (6, HIDDEN), "scale": (HIDDEN,), "probs": (6, 2)}
    shapes |= {"gate_up": (EXPERTS, 2 * INNER, HIDDEN), "down": (EXPERTS, HIDDEN, INNER)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    indices = torch.tensor([[0, 2], [2, 0], [3, 2], [0, 3], [3, 0], [2, 3]])
    return {name: each.to(device).requires_grad_() for name, each in tensors.items()}, indices.to(device)


def in_plain_torch(x, scale, probs, gate_up, down, indices):
    """The right result."""
    x = functional.rms_norm(x, (HIDDEN,), scale, EPS)
    result = torch.zeros_like(x)
    for choice in range(indices.shape[1]):
        gate, up = torch.einsum("ti,toi->to", x, gate_up[indices[:, choice]]).chunk(2, -1)
        inner = functional.silu(gate) * up
        result = result + probs[:, choice, None] * torch.einsum("ti,toi->to", inner, down[indices[:, choice]])
    return result


class Right:
    """Has a method for each step, so that a subclass can get one step wrong."""

    rows: ClassVar = {"split_item": 2, "group_type": 0, "group_list_type": 1}
    inner: ClassVar = {"split_item": 3, "group_type": 2, "group_list_type": 1}

    def __call__(self, x, scale, probs, gate_up, down, indices):
        x = self.norm(x, scale)
        permuted, rows = npu.npu_moe_token_permute(x, indices)
        counts = self.counts(indices)
        inner = self.gate(self.multiply(permuted, gate_up.mT, counts))
        return self.combine(self.multiply(inner, down.mT, counts), rows, probs)

    def norm(self, x, scale):
        return npu.npu_rms_norm(x, scale, EPS)[0]

    def counts(self, indices):
        return torch.histc(indices.float(), EXPERTS, 0, EXPERTS - 1).long()

    def multiply(self, x, weight, counts):
        return Multiply.apply(self, x, weight, counts)

    def product(self, x, weight, counts):
        return npu.npu_grouped_matmul([x], [weight], group_list=counts, **self.rows)[0]

    def of_x(self, upstream, weight, counts):
        return self.product(upstream.contiguous(), weight.mT, counts)

    def of_weight(self, x, upstream, counts):
        return npu.npu_grouped_matmul([x.T], [upstream.contiguous()], group_list=counts, **self.inner)[0]

    def gate(self, inner):
        return npu.npu_swiglu(inner)

    def combine(self, y, rows, probs):
        return npu.npu_moe_token_unpermute(y, rows, probs)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, steps, x, weight, counts):
        ctx.steps = steps
        ctx.save_for_backward(x, weight, counts)
        return steps.product(x, weight, counts)

    @staticmethod
    def backward(ctx, upstream):
        x, weight, counts = ctx.saved_tensors
        return None, ctx.steps.of_x(upstream, weight, counts), ctx.steps.of_weight(x, upstream, counts), None


class EpsDropped(Right):
    def norm(self, x, scale):
        return npu.npu_rms_norm(x, scale)[0]


class EpsMisnamed(Right):
    def norm(self, x, scale):
        return npu.npu_rms_norm(x, scale, eps=EPS)[0]


class TupleKept(Right):
    def norm(self, x, scale):
        return npu.npu_rms_norm(x, scale, EPS)


class NormOfTheSum(Right):
    """npu_add_rms_norm has no backward."""

    def norm(self, x, scale):
        return npu.npu_add_rms_norm(x, torch.zeros_like(x), scale, EPS)[0]


class HalvesSwapped(Right):
    def gate(self, inner):
        return npu.npu_swiglu(torch.cat(inner.chunk(2, -1)[::-1], -1))


class GateOfAView(Right):
    def gate(self, inner):
        return npu.npu_swiglu(inner.T, 0).T


class NoAutogradFunction(Right):
    """npu_grouped_matmul has no backward, and does not say so."""

    def multiply(self, x, weight, counts):
        return self.product(x, weight, counts)


class CountsAsEnds(Right):
    rows: ClassVar = {**Right.rows, "group_list_type": 0}


class CountsInInt32(Right):
    def counts(self, indices):
        return super().counts(indices).int()


class CountsOnTheHost(Right):
    def counts(self, indices):
        return super().counts(indices).cpu()


class CountsThatWait(Right):
    """The size of bincount's result depends on values, so the host waits."""

    def counts(self, indices):
        return torch.bincount(indices.flatten(), minlength=EXPERTS)


class LastExpertForgotten(Right):
    def counts(self, indices):
        counts = super().counts(indices)
        return torch.cat((counts[:-1], counts.new_zeros(1)))


class UntransposedForX(Right):
    """The weights are square, so the shapes do not give the mistake away."""

    def of_x(self, upstream, weight, counts):
        return (
            self.product(upstream.contiguous(), weight, counts)
            if weight.shape[1] == weight.shape[2]
            else (super().of_x(upstream, weight, counts))
        )


class UpstreamAsItComes(Right):
    def of_x(self, upstream, weight, counts):
        return self.product(upstream.mT.contiguous().mT, weight.mT, counts)


class CopyOfXTransposed(Right):
    def of_weight(self, x, upstream, counts):
        return npu.npu_grouped_matmul([x.T.contiguous()], [upstream], group_list=counts, **self.inner)[0]


class RowsForTheWeight(Right):
    inner: ClassVar = {**Right.inner, "group_type": 0}


class ProbsDropped(Right):
    def combine(self, y, rows, probs):
        return super().combine(y, rows, torch.ones_like(probs))


class ProbsDetached(Right):
    def combine(self, y, rows, probs):
        return super().combine(y, rows, probs.detach())


class OrderForRows(Right):
    def combine(self, y, rows, probs):
        return super().combine(y, rows.argsort().int(), probs)


class RowsInInt64(Right):
    def combine(self, y, rows, probs):
        return super().combine(y, rows.long(), probs)
