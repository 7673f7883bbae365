"""The autograd functions of the grouped matmul by themselves, against a loop over the groups."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import HALF, assert_close, leaves, on

from fuseplug_moe.backends.npu import GmmFunction, HybridGmmFunction, gmm

COUNTS = {"some idle": [2, 0, 3, 1], "one group": [6], "a tail": [2, 1, 0], "one row": [0, 1], "all in one": [0, 6]}


class TestGroupedMatmul:
    """The two autograd functions by themselves, against a loop over the groups."""

    def tensors(self, counts, dtype, *, transposed, biased):
        generator = torch.Generator().manual_seed(3)
        rows = max(1, 6 if sum(counts) != 1 else 1)
        x = torch.randn(rows, 5, generator=generator).to(dtype).requires_grad_()
        shape = (len(counts), 4, 5) if transposed else (len(counts), 5, 4)
        weight = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        bias = torch.randn(len(counts), 4, generator=generator).to(gmm.DTYPES[dtype]).requires_grad_()
        return x, weight, bias if biased else None

    @staticmethod
    def loop(x, weight, bias, counts):
        pieces = [
            piece @ matrix + (0 if bias is None else bias[group].to(x.dtype))
            for group, (piece, matrix) in enumerate(zip(x[: sum(counts)].split(counts), weight, strict=True))
        ]
        return torch.cat(pieces)

    @pytest.mark.parametrize("dtype", HALF, ids=str)
    @pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
    @pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
    @pytest.mark.parametrize("listed", [False, True], ids=["stacked", "listed"])
    @pytest.mark.parametrize("counts", COUNTS)
    def test_is_a_loop_over_groups_and_so_are_the_gradients(self, host_npu, counts, listed, transposed, biased, dtype):
        counts = COUNTS[counts]
        x, weight, bias = self.tensors(counts, dtype, transposed=transposed, biased=biased)
        inner = weight.mT if transposed else weight
        expected = self.loop(x, inner, bias, counts)
        upstream = torch.randn(expected.shape, generator=torch.manual_seed(4)).to(dtype)
        wanted = [t for t in (x, weight, bias) if t is not None]
        true = [expected, *torch.autograd.grad(expected, wanted, upstream)]

        x, weight, bias = (None if t is None else on("npu", t) for t in (x, weight, bias))
        group_list = torch.tensor(counts).to("npu")
        if listed:
            each = leaves(weight)
            result = HybridGmmFunction.apply(x, group_list, bias, None, *(w.t() if transposed else w for w in each))
        else:
            each = [weight]
            result = GmmFunction.apply(x, weight.mT if transposed else weight, group_list, bias)
        upstream = torch.cat((upstream, upstream.new_zeros(len(x) - len(upstream), 4))).to("npu")
        of_x, *of_each = torch.autograd.grad(result, [x, *each, *([] if bias is None else [bias])], upstream)
        of_bias = of_each.pop() if bias is not None else None
        of_weight = torch.stack(of_each) if listed else of_each[0]
        found = [result[: sum(counts)], of_x[: sum(counts)], of_weight, of_bias]
        true[1] = true[1][: sum(counts)]
        assert_close([each.detach().cpu() for each in found if each is not None], true, HALF[dtype])

    @pytest.mark.parametrize("transposed", [False, True])
    def test_gradients_of_weights_lie_as_these_do(self, host_npu, transposed):
        x, weight, _ = self.tensors([3, 3], torch.float32, transposed=transposed, biased=False)
        x, weight = on("npu", [x, weight])
        result = GmmFunction.apply(x, weight.mT if transposed else weight, torch.tensor([3, 3]).to("npu"))
        given = []
        weight.register_hook(given.append)
        result.sum().backward()
        assert given[0].stride() == weight.stride()

    def test_gradients_are_not_differentiated_in_silence(self, host_npu):
        x, weight, _ = self.tensors([3, 3], torch.float32, transposed=False, biased=False)
        x, weight = on("npu", [x, weight])
        result = GmmFunction.apply(x, weight, torch.tensor([3, 3]).to("npu"))
        (gradient,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()
