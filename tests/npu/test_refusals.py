"""Where CANN refuses a call, or departs from its documentation, the stand-in does the same, for each chip."""

import pytest
import torch

from fuseplug_host_npu import ContractError, FakeNPU, HostNPU

npu = torch.ops.npu
A2, A5 = "Ascend910B3", "Ascend950PR_9599"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def ones(*shape, dtype=FP32, grad=False):
    return torch.ones(*shape, dtype=dtype, device="npu", requires_grad=grad)


def whole(*numbers, dtype=torch.int64):
    return torch.tensor(numbers, dtype=dtype, device="npu")


def refused(call):
    """The argument that the error names; ``None`` if the call is fine."""
    try:
        call()
    except ContractError as error:
        return error.argument
    return None


def rotate(x, dtype, table=None):
    *_, rows, width = x
    tables = [ones(*(table or (1, 1, rows, width)), dtype=dtype) for _ in range(2)]
    return lambda: npu.npu_rotary_mul(ones(*x, dtype=dtype), *tables, "half")


class TestTheLayoutOfRotations:
    """CANN's CheckBnsdBlockSkip: contiguous heads with tables of the sequence alone."""

    @pytest.mark.parametrize(
        ("x", "dtype", "cores", "is_refused"),
        [
            ((8, 32, 16, 128), BF16, 40, True),
            ((16, 8, 15, 256), BF16, 40, True),
            ((16, 8, 16, 256), BF16, 40, False),
            ((16, 8, 15, 256), FP32, 1, True),
            ((1, 256, 16, 128), BF16, 40, False),
            ((2, 4, 64, 40), BF16, 40, True),
            ((2, 4, 64, 40), FP32, 40, True),
            ((2, 4, 64, 40), BF16, 4, False),
            ((2, 4, 64, 80), FP16, 40, False),
            ((2, 2, 320, 40), BF16, 40, False),
            ((2, 2, 320, 40), BF16, 48, True),
            ((2, 4, 64, 48), FP32, 40, False),
        ],
    )
    def test_is_refused_by_sizes_and_cores(self, host_npu, x, dtype, cores, is_refused):
        for stand_in in (HostNPU, FakeNPU):
            with stand_in(vector_cores=cores):
                assert refused(rotate(x, dtype)) == ("input" if is_refused else None)
        with HostNPU(soc=A5, vector_cores=cores):
            assert refused(rotate(x, dtype)) is None

    @pytest.mark.parametrize("table", [(8, 1, 16, 128), (8, 32, 16, 128)])
    def test_is_another_with_tables_of_more(self, host_npu, table):
        assert refused(rotate((8, 32, 16, 128), BF16, table)) is None

    def test_the_message_names_the_source(self, host_npu):
        with pytest.raises(ContractError, match=r"rope_rotate_half_tiling\.cpp, CheckBnsdBlockSkip"):
            rotate((8, 32, 16, 128), BF16)()


class TestBackwards:
    def test_of_an_empty_norm_by_chip(self, host_npu):
        def backward():
            y = npu.npu_rms_norm(ones(0, 4096, grad=True), ones(4096))[0]
            y.sum().backward()

        assert refused(backward) == "dy"
        with HostNPU(soc=A5):
            assert refused(backward) is None

    @pytest.mark.parametrize(
        ("call", "argument"),
        [
            (lambda: npu.npu_rms_norm_backward(ones(3, 4, dtype=BF16), ones(3, 4), ones(4), ones(3, 1)), "dy"),
            (lambda: npu.npu_rms_norm_backward(ones(3, 4), ones(3, 4), ones(4), ones(4, 1)), "rstd"),
            (lambda: npu.npu_swiglu_backward(ones(3, 4), ones(3, 4)), "grad_output"),
            (lambda: npu.npu_geglu_grad(ones(3, 2, dtype=BF16), ones(3, 4), ones(3, 2)), "grad_output"),
            (lambda: npu.npu_geglu_grad(ones(3, 2), ones(3, 4), ones(2, 2)), "gelu"),
            (
                lambda: npu.npu_rotary_mul_backward(
                    ones(2, 3, 5, 8), ones(2, 3, 4, 8), ones(1, 1, 5, 8), ones(1, 1, 5, 8)
                ),
                "grad",
            ),
            (lambda: unpermuted(2, 513), "probs"),
            (lambda: unpermuted(2, 0, rows=3), "top_k"),
            (lambda: unpermuted(2, 1, rows=0), "rows"),
        ],
    )
    def test_have_limits_of_their_own(self, host_npu, call, argument):
        assert refused(call) == argument


def unpermuted(tokens, k, rows=None):
    rows = tokens * k if rows is None else rows
    places = torch.arange(tokens * k, dtype=torch.int32, device="npu")
    return npu.npu_moe_token_unpermute_grad_v2(
        ones(tokens, 3), places, rows, FP32, ones(tokens, k), permuted_tokens=ones(rows, 3)
    )


def multiply(weights, counts=(1, 2), x=None, dtype=BF16, **how):
    x = ones(3, 4, dtype=dtype) if x is None else x
    how = {"group_list": whole(*counts), "split_item": 2, "group_type": 0, "group_list_type": 1} | how
    return lambda: npu.npu_grouped_matmul([x], weights, **how)


class TestGroupedMatmul:
    def test_a_list_of_weights(self, host_npu):
        plain, turned = ones(4, 5, dtype=BF16), ones(5, 4, dtype=BF16).t()
        assert refused(multiply([plain, plain])) is None
        assert refused(multiply([turned, turned])) is None
        assert refused(multiply([plain, turned])) == "weight"
        assert refused(multiply([plain, ones(4, 6, dtype=BF16)])) == "weight"
        assert refused(multiply([plain, plain], counts=(1, 1, 1))) == "group_list"
        assert refused(multiply([ones(4, 5), ones(4, 5)], dtype=FP32)) == "weight"
        assert refused(multiply([plain] * 129, counts=[0] * 129)) == "weight"

    def test_on_another_chip(self, host_npu):
        listed = [ones(4, 5, dtype=BF16)] * 2
        for counts, both, last in (((1, 1), None, "group_list"), ((1, 2), None, None)):
            assert refused(multiply(listed, counts)) is both
            with HostNPU(soc=A5):
                assert refused(multiply(listed, counts)) == last
        with HostNPU(soc=A5):
            assert refused(multiply([ones(2, 4, 5)], dtype=FP32)) == "x"

    @pytest.mark.parametrize("counts", [(2, 2), (4, -1)])
    def test_groups_beyond_the_rows(self, host_npu, counts):
        assert refused(multiply([ones(2, 4, 5)], counts, dtype=FP32)) == "group_list"
        x = ones(3, 4).t()
        assert refused(multiply([ones(3, 5)], counts, x, group_type=2)) == "group_list"

    def test_transposition_is_read_from_strides_as_they_are(self, host_npu):
        inner = {"group_type": 2, "counts": (1, 0)}
        row = ones(1, 4)
        assert refused(multiply([ones(1, 5)], x=row.t(), **inner)) is None
        odd = row.as_strided((1, 4), (9, 1))
        assert odd.is_contiguous()
        assert refused(multiply([ones(1, 5)], x=odd.t(), **inner)) == "x"
        turned = ones(5, 9)[:1].as_strided((1, 5), (1, 1))
        assert turned.is_contiguous()
        assert refused(multiply([turned], x=row.t(), **inner)) == "weight"
        assert refused(multiply([ones(2, 4, 5)], counts=(1, 0), x=row.as_strided((1, 4), (1, 1)))) == "x"

    @pytest.mark.parametrize(
        ("dtype", "bias", "fits"), [(BF16, FP32, 1), (BF16, BF16, 0), (FP16, FP16, 1), (FP16, FP32, 0)]
    )
    def test_the_dtype_of_a_bias(self, host_npu, dtype, bias, fits):
        call = multiply([ones(2, 4, 5, dtype=dtype)], dtype=dtype, bias=[ones(2, 5, dtype=bias)])
        assert refused(call) == (None if fits else "bias")
        with HostNPU(soc=A5):
            assert refused(call) is None

    def test_of_nothing_nothing_is_written(self, host_npu):
        x = ones(0, 4).t()
        (y,) = multiply([ones(0, 5)], (0, 0), x, group_type=2)()
        assert y.isnan().all()


class TestValues:
    def test_of_indices(self, host_npu):
        rows, weights = ones(4, 3), ones(2, 2)

        def back(*places):
            return lambda: npu.npu_moe_token_unpermute(rows, whole(*places, dtype=torch.int32), weights)

        assert refused(back(0, 2, 1, 4)) is None
        assert refused(back(0, 9, 9, 1)) is None
        assert refused(back(0, 2, 2, 1)) == refused(back(0, 2, -1, 1)) == refused(back(0, 2, -2, 1)) == "sorted_indices"
        with HostNPU(soc=A5):
            assert refused(back(0, 2, -1, 1)) is None
            assert refused(back(0, 2, -2, 1)) == "sorted_indices"
        assert refused(lambda: npu.npu_moe_token_permute(rows, whole(0, 1, (1 << 24) + 1, 2))) == "indices"

    def test_what_is_skipped_goes_by_the_chip(self, host_npu):
        rows, places = torch.tensor([[float("nan")], [2.0]], device="npu"), whole(0, 1, dtype=torch.int32)
        weights = torch.tensor([[0.0, 1.0]], device="npu")
        assert npu.npu_moe_token_unpermute(rows, places, weights).tolist() == [[2.0]]
        with HostNPU(soc=A5):
            assert npu.npu_moe_token_unpermute(rows, places, weights).isnan().all()
            assert npu.npu_moe_token_unpermute(rows, whole(2, 1, dtype=torch.int32), weights).tolist() == [[2.0]]

    @pytest.mark.parametrize("limit", [0.0, -1.0])
    def test_a_clamp_has_a_limit_above_zero(self, host_npu, limit):
        assert refused(lambda: npu.npu_clipped_swiglu(ones(2, 8), limit=limit)) == "limit"

    @pytest.mark.parametrize(("groups", "argument"), [(8192, None), (8193, "group_index"), (0, "group_index")])
    def test_a_clamped_gate_has_so_many_groups(self, host_npu, groups, argument):
        index = torch.zeros(groups, dtype=torch.int64, device="npu")
        assert refused(lambda: npu.npu_clipped_swiglu(ones(2, 8), group_index=index)) == argument


class TestResults:
    def test_are_contiguous(self, host_npu):
        x = torch.randn(2, 3, 4, device="npu").transpose(0, 1)
        assert npu.npu_rms_norm(x, ones(4))[0].stride() == (8, 4, 1)
        assert npu.npu_rotary_mul(x[None], ones(1, 3, 2, 4), ones(1, 3, 2, 4)).is_contiguous()
        assert npu.npu_rms_norm(ones(1, 9)[:, :4], ones(4))[0].stride() == (4, 1)

    def test_memory_is_not_a_number_until_it_is_written(self, host_npu):
        for dtype in (FP16, BF16, FP32):
            ones(1000, dtype=dtype)
            assert torch.empty(1000, dtype=dtype, device="npu").isnan().all()

    def test_a_row_without_a_choice_has_no_gradient(self, host_npu):
        places = whole(0, 4, 2, 4, dtype=torch.int32)
        rows, weights = npu.npu_moe_token_unpermute_grad_v2(
            ones(2, 3), places, 4, FP32, ones(2, 2), permuted_tokens=ones(4, 3)
        )
        assert rows.isnan().any(1).tolist() == [False, True, False, True]
        assert weights.tolist() == [[3, 0], [3, 0]]

    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_a_norm_of_a_sum_is_rounded_twice(self, host_npu, dtype):
        x, y, weight = (torch.randn(*shape, dtype=dtype) for shape in ((64, 48), (64, 48), (48,)))
        found, rstd, total = (t.cpu() for t in npu.npu_add_rms_norm(x.npu(), y.npu(), weight.npu(), 1e-6))
        exact = x.float() + y.float()
        of = exact if dtype is BF16 else exact.to(dtype).float()
        assert torch.equal(total, exact.to(dtype))
        torch.testing.assert_close(rstd, of.square().mean(-1, keepdim=True).add(1e-6).rsqrt())
        assert torch.equal(found, (of * rstd).to(dtype) * weight)
        once = npu.npu_rms_norm(total.npu(), weight.npu(), 1e-6)[0]
        assert not torch.equal(found, once.cpu())

    def test_a_weight_s_gradient_is_added_up_in_any_order(self, host_npu):
        dy, x, gamma = torch.randn(512, 8, device="npu"), torch.randn(512, 8, device="npu"), ones(8)
        rstd = npu.npu_rms_norm(x, gamma)[1]

        def several():
            return [npu.npu_rms_norm_backward(dy, x, gamma, rstd)[1].cpu() for _ in range(8)]

        first, *rest = several()
        assert not all(torch.equal(each, first) for each in rest)
        for each in rest:
            torch.testing.assert_close(each, first, rtol=1e-4, atol=1e-4)
        torch.use_deterministic_algorithms(True)
        try:
            first, *rest = several()
        finally:
            torch.use_deterministic_algorithms(False)
        assert all(torch.equal(each, first) for each in rest)


class TestMachines:
    def test_say_their_chip(self, host_npu):
        own = torch.npu.get_device_name()
        with HostNPU(soc=A5):
            assert torch.npu.get_device_name() == A5
            with HostNPU(soc=A2):
                assert torch.npu.get_device_name() == A2
        assert torch.npu.get_device_name() == own

    def test_may_lack_an_operation(self, host_npu):
        with HostNPU(lacking={"npu_clipped_swiglu"}) as old:
            with pytest.raises(RuntimeError, match=r"npu_clipped_swiglu: its kernel is not in libopapi\.so"):
                npu.npu_clipped_swiglu(ones(2, 8))
            assert not old.calls["npu_clipped_swiglu"]
        npu.npu_clipped_swiglu(ones(2, 8))
