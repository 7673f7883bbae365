"""Errors name the calls beyond a documented limit, on tensors that have values and on those that have none."""

import pytest
import torch

from fuseplug_host_npu import ContractError, HostNPU, limit, require

BF16, FP16, FP32, FP64, INT32, INT64 = (
    getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64", "int32", "int64")
)


def floats(*shape, dtype=FP32, grad=False):
    return torch.ones(*shape, dtype=dtype, device="npu", requires_grad=grad)


def ints(*shape, dtype=INT64):
    return torch.ones(*shape, dtype=dtype, device="npu")


def rms_norm(x=(2, 8), gamma=(8,), x_dtype=FP32, gamma_dtype=FP32):
    return torch.ops.npu.npu_rms_norm(floats(*x, dtype=x_dtype), floats(*gamma, dtype=gamma_dtype))


def gemma_rms_norm(x=(2, 8), x_dtype=FP32, gamma_dtype=FP32, strided=False):
    x = floats(*x, dtype=x_dtype)
    return torch.ops.npu.npu_gemma_rms_norm(x.T if strided else x, floats(8, dtype=gamma_dtype))


def add_rms_norm(x=(2, 8), y=(2, 8), dtype=FP32, gamma_dtype=FP32):
    tensors = (floats(*x, dtype=dtype), floats(*y, dtype=dtype), floats(8, dtype=gamma_dtype))
    return torch.ops.npu.npu_add_rms_norm(*tensors)


def swiglu(x=(2, 8), dim=-1, dtype=FP32, strided=False):
    x = floats(*x, dtype=dtype)
    return torch.ops.npu.npu_swiglu(x.mT if strided else x, dim)


def geglu(x=(2, 8), dim=-1, approximate=1):
    return torch.ops.npu.npu_geglu(floats(*x), dim, approximate)


def clipped_swiglu(x=(2, 8), strided=False, groups=(2,), groups_dtype=INT64):
    x, groups = floats(*x), torch.zeros(*groups, dtype=groups_dtype, device="npu")
    return torch.ops.npu.npu_clipped_swiglu(x.T if strided else x, group_index=groups)


def rotary_mul(x=(2, 3, 5, 16), r=(1, 1, 5, 16), r2=None, mode="half", rotate=False, dtype=FP32, grad=False):
    rotation = floats(x[-1], x[-1]) if rotate else None
    tensors = (floats(*x, dtype=dtype, grad=grad), floats(*r, grad=grad), floats(*(r2 or r)))
    return torch.ops.npu.npu_rotary_mul(*tensors, mode, rotation)


def mrope(width=64, head=64, dtype=BF16, key_dtype=BF16, positions=(4,), section=None, mode="half", cache="default"):
    positions = torch.zeros(*positions, dtype=INT64, device="npu")
    tensors = (
        positions,
        floats(4, 2 * head, dtype=dtype),
        floats(4, head, dtype=key_dtype),
        floats(9, width, dtype=dtype),
    )
    return torch.ops.npu.npu_mrope(*tensors, head, mrope_section=section, rotary_mode=mode, cache_mode=cache)


def interleave_rope(x=(2, 3, 5, 64), cos=(2, 1, 5, 64), dtype=BF16):
    return torch.ops.npu.npu_interleave_rope(*(floats(*shape, dtype=dtype) for shape in (x, cos, cos)))


def apply_rotary(q=(2, 5, 3, 64), cos=(2, 5, 1, 64), layout="BSND", mode="half"):
    tensors = [floats(*shape) for shape in (q, q, cos, cos)]
    return torch.ops.npu.npu_apply_rotary_pos_emb(*tensors, layout, mode)


def gating(x=(4, 8), k=2, finished=None, dtype=FP32):
    finished = None if finished is None else torch.zeros(*finished, dtype=torch.bool, device="npu")
    return torch.ops.npu.npu_moe_gating_top_k_softmax(floats(*x, dtype=dtype), finished, k)


def permute(tokens=(4, 8), indices=(4, 2), dtype=INT64, tokens_dtype=FP32, padded=False):
    return torch.ops.npu.npu_moe_token_permute(
        floats(*tokens, dtype=tokens_dtype), ints(*indices, dtype=dtype), None, padded
    )


def unpermute(permuted=(8, 8), indices=(8,), probs=(4, 2), dtype=INT32, probs_dtype=FP32, padded=False, restore=None):
    rows = torch.arange(indices[0], dtype=dtype, device="npu")
    probs = None if probs is None else floats(*probs, dtype=probs_dtype)
    return torch.ops.npu.npu_moe_token_unpermute(floats(*permuted), rows, probs, padded, restore)


def grouped(
    x=(6, 8), weight=(2, 8, 4), groups=2, x_dtype=FP32, groups_dtype=INT64, x_strided=False, weight_strided=None, **how
):
    x, weight = floats(*x, dtype=x_dtype), floats(*weight)
    x = x.T.contiguous().T if x_strided else x
    if weight_strided:
        weight = weight.transpose(*weight_strided).contiguous().transpose(*weight_strided)
    group_list = None if groups is None else torch.zeros(groups, dtype=groups_dtype, device="npu")
    how = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": group_list, **how}
    return torch.ops.npu.npu_grouped_matmul([x], [weight], **how)


def grouped_inner(x=(8, 6), weight=(6, 4), x_strided=True, weight_strided=False, **how):
    x, weight = floats(*x), floats(*weight)
    x = x.T.contiguous().T if x_strided else x
    weight = weight.T.contiguous().T if weight_strided else weight
    how = {"split_item": 3, "group_type": 2, "group_list_type": 1, "group_list": ints(2), **how}
    return torch.ops.npu.npu_grouped_matmul([x], [weight], **how)


# The function, its arguments, and the argument that the error names; None if the call is fine.
CALLS = [
    (rms_norm, {}, None),
    (rms_norm, {"x": (0, 8)}, None),
    (rms_norm, {"x": (2, 3, 8), "gamma": (3, 8)}, None),
    (rms_norm, {"x_dtype": BF16}, None),
    (rms_norm, {"x": (8,)}, "x"),
    (rms_norm, {"x": (1,) * 8 + (8,)}, "x"),
    (rms_norm, {"x_dtype": FP64, "gamma_dtype": FP64}, "x"),
    (rms_norm, {"gamma": (7,)}, "gamma"),
    (rms_norm, {"gamma": (1,)}, "gamma"),
    (rms_norm, {"gamma_dtype": BF16}, "gamma"),
    (rms_norm, {"x_dtype": BF16, "gamma_dtype": FP16}, "gamma"),
    (gemma_rms_norm, {}, None),
    (gemma_rms_norm, {"x": (0, 8)}, "x"),
    (gemma_rms_norm, {"x": (8, 8), "strided": True}, "x"),
    (gemma_rms_norm, {"x_dtype": BF16}, "gamma"),
    (add_rms_norm, {}, None),
    (add_rms_norm, {"x": (0, 8), "y": (0, 8)}, "x1"),
    (add_rms_norm, {"y": (1, 8)}, "x2"),
    (add_rms_norm, {"gamma_dtype": BF16}, "gamma"),
    (swiglu, {}, None),
    (swiglu, {"x": (4, 7), "dim": 0}, None),
    (swiglu, {"x": (2, 7)}, "x"),
    (swiglu, {"x": (0, 8)}, "x"),
    (swiglu, {"x": (4, 8), "strided": True}, "x"),
    (swiglu, {"dtype": FP64}, "x"),
    (swiglu, {"x": (1,) * 8 + (8,)}, "x"),
    (geglu, {}, None),
    (geglu, {"x": (2, 7)}, "x"),
    (geglu, {"approximate": 2}, "approximate"),
    (clipped_swiglu, {}, None),
    (clipped_swiglu, {"x": (8,)}, "x"),
    (clipped_swiglu, {"x": (2, 7)}, "x"),
    (clipped_swiglu, {"x": (8, 2), "strided": True}, "x"),
    (clipped_swiglu, {"groups_dtype": INT32}, "group_index"),
    (clipped_swiglu, {"groups": (1, 2)}, "group_index"),
    (rotary_mul, {}, None),
    (rotary_mul, {"r": (2, 1, 5, 16), "grad": True}, None),
    (rotary_mul, {"r": (1, 3, 1, 16)}, None),
    (rotary_mul, {"r": (2, 1, 1, 16)}, None),
    (rotary_mul, {"r": (2, 3, 5, 16)}, None),
    (rotary_mul, {"x": (5, 3, 16), "r": (5, 1, 16), "mode": "interleave"}, None),
    (rotary_mul, {"mode": "interleave"}, None),
    (rotary_mul, {"mode": "nope"}, "rotary_mode"),
    (rotary_mul, {"mode": "interleave", "r": (2, 1, 5, 16)}, "r1"),
    (rotary_mul, {"mode": "interleave", "x": (5, 3, 16), "r": (5, 3, 16)}, "r1"),
    (rotary_mul, {"r": (1, 1, 1, 16)}, "r1"),
    (rotary_mul, {"r": (1, 1, 5, 4)}, "r1"),
    (rotary_mul, {"r": (5, 1, 16)}, "r1"),
    (rotary_mul, {"r2": (2, 1, 5, 16)}, "r2"),
    (rotary_mul, {"x": (2, 3, 5, 7), "r": (1, 1, 5, 7)}, "input"),
    (rotary_mul, {"x": (2, 3, 5, 896), "r": (1, 1, 5, 896)}, "input"),
    (rotary_mul, {"x": (1000, 1, 5, 16)}, "input"),
    (rotary_mul, {"x": (99, 11, 5, 16), "mode": "interleave"}, "input"),
    (rotary_mul, {"x": (99, 11, 5, 16), "grad": True}, "input"),
    (rotary_mul, {"dtype": FP64}, "input"),
    (rotary_mul, {"rotate": True}, None),
    (rotary_mul, {"rotate": True, "grad": True}, "rotate"),
    (mrope, {}, None),
    (mrope, {"positions": (3, 4), "section": [8, 12, 12]}, None),
    (mrope, {"positions": (3, 4), "section": [8, 12, 13]}, "mrope_section"),
    (mrope, {"width": 80, "head": 96}, "cos_sin_cache"),
    (mrope, {"width": 96}, "cos_sin_cache"),
    (mrope, {"width": 32, "head": 48}, "head_size"),
    (mrope, {"width": 48, "head": 48, "dtype": FP32, "key_dtype": FP32}, None),
    (mrope, {"key_dtype": FP32}, "key"),
    (mrope, {"mode": "interleave"}, "rotary_mode"),
    (mrope, {"cache": "nope"}, "cache_mode"),
    (interleave_rope, {}, None),
    (interleave_rope, {"cos": (2, 1, 1, 64)}, None),
    (interleave_rope, {"dtype": FP32}, "x"),
    (interleave_rope, {"x": (2, 3, 5, 32), "cos": (2, 1, 5, 32)}, "x"),
    (interleave_rope, {"cos": (2, 3, 5, 64)}, "cos"),
    (apply_rotary, {}, None),
    (apply_rotary, {"q": (5, 3, 128), "cos": (5, 1, 128), "layout": "TND"}, None),
    (apply_rotary, {"layout": "BNSD"}, "layout"),
    (apply_rotary, {"mode": "interleave"}, "rotary_mode"),
    (apply_rotary, {"q": (2, 5, 3, 80), "cos": (2, 5, 1, 80)}, "query"),
    (apply_rotary, {"cos": (1, 5, 1, 64)}, "cos"),
    (gating, {}, None),
    (gating, {"finished": (4,)}, None),
    (gating, {"k": 9}, "k"),
    (gating, {"k": 0}, "k"),
    (gating, {"finished": (3,)}, "finished"),
    (permute, {}, None),
    (permute, {"indices": (4,)}, None),
    (permute, {"indices": (3, 2)}, "indices"),
    (permute, {"indices": (4, 513)}, "indices"),
    (permute, {"dtype": torch.int16}, "indices"),
    (permute, {"tokens_dtype": FP64}, "tokens"),
    (permute, {"padded": True}, "padded_mode"),
    (unpermute, {}, None),
    (unpermute, {"probs": None}, None),
    (unpermute, {"probs_dtype": BF16}, None),
    (unpermute, {"dtype": INT64}, "sorted_indices"),
    (unpermute, {"probs": (3, 2)}, "probs"),
    (unpermute, {"padded": True, "restore": [4, 8]}, "padded_mode"),
    (unpermute, {"restore": [4, 8]}, "restore_shape"),
    (grouped, {}, None),
    (grouped, {"weight_strided": (1, 2)}, None),
    (grouped, {"weight_strided": (0, 1)}, "weight"),
    (grouped, {"x_strided": True}, "x"),
    (grouped, {"x": (6, 7)}, "weight"),
    (grouped, {"x_dtype": BF16}, "x"),
    (grouped, {"groups": 3}, "group_list"),
    (grouped, {"groups": None}, "group_list"),
    (grouped, {"groups_dtype": INT32}, "group_list"),
    (grouped, {"weight": (1, 8, 4), "groups": 1}, "group_list"),
    (grouped, {"weight": (1, 8, 4), "groups": 1, "group_list_type": 0}, None),
    (grouped, {"split_item": 0}, "split_item"),
    (grouped, {"weight": (2, 8, 65536)}, "weight"),
    (grouped_inner, {}, None),
    (grouped_inner, {"x_strided": False}, "x"),
    (grouped_inner, {"weight_strided": True}, "weight"),
    (grouped_inner, {"weight": (5, 4)}, "weight"),
    (grouped_inner, {"split_item": 0}, "split_item"),
]
IDS = [f"{call.__name__} {given}" for call, given, _ in CALLS]


@pytest.mark.parametrize("stand_in", ["fake_npu", "host_npu"])
@pytest.mark.parametrize(("call", "given", "named"), CALLS, ids=IDS)
def test_a_limit_on_tensors_without_values_and_with(request, stand_in, call, given, named):
    request.getfixturevalue(stand_in)
    assert argument_named(call, given) == named


def argument_named(call, given):
    try:
        call(**given)
    except ContractError as error:
        return error.argument
    return None


def test_the_message_says_what_was_asked_and_found_and_where_it_is_documented(host_npu):
    with pytest.raises(ContractError) as caught:
        swiglu((2, 7))
    assert str(caught.value) == (
        "npu_swiglu: x must be of an even size along dim -1; it is float32[2, 7] "
        "(documented in （beta）torch_npu-npu_swiglu.md)"
    )
    assert (caught.value.op, caught.value.argument) == ("npu_swiglu", "x")
    for call, words in (
        (lambda: swiglu((4, 8), strided=True), "x must be contiguous; it is strided (1, 8) for [8, 4]"),
        (lambda: rotary_mul(mode="nope"), "rotary_mode must be 'half' or 'interleave'; it is 'nope'"),
        (lambda: grouped(x_dtype=BF16), "it is [bfloat16[6, 8]]"),
    ):
        with pytest.raises(ContractError) as caught:
            call()
        assert words in str(caught.value)


def test_a_call_beyond_the_limits_is_not_run(host_npu):
    with pytest.raises(ContractError):
        swiglu((2, 8), strided=True)
    assert argument_named(swiglu, {}) is None


def test_limits_can_be_left_out(host_npu):
    with HostNPU(contract=False):
        assert swiglu((4, 2), dim=-2, strided=True).shape == (1, 4)


def test_somebody_elses_op_has_limits_too(fake_npu):
    library = torch.library.Library("limits_of_mine", "DEF")
    try:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "Meta")

        @limit("limits_of_mine::double", page="README.md")
        def double(x):
            require(x.dim() == 1, "x", "of one dim", x)

        torch.ops.limits_of_mine.double(floats(2))
        with pytest.raises(ContractError, match=r"double: x must be of one dim; it is float32\[2, 2\] .*README"):
            torch.ops.limits_of_mine.double(floats(2, 2))
    finally:
        library._destroy()
