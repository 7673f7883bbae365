"""References compute what the ops document; their gradients match finite differences and others' code."""

import inspect

import pytest
import torch
from torch.nn import functional

from fuseplug_host_npu import HostNPU, reference
from fuseplug_host_npu.references import references

npu = torch.ops.npu


@pytest.fixture
def unlimited(host_npu):
    """An NPU that computes float64, too, which no real NPU has, for finite differences."""
    with HostNPU(contract=False) as inner:
        yield inner


def rand(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype)


def rows_of(experts):
    return torch.argsort(torch.argsort(experts.flatten(), stable=True), stable=True).int()


EXPERTS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])
MASK = torch.tensor([[False, True, True], [False, False, True], [False, False, False]])

# For each backward, by the name of its call: the op as a function of the differentiable inputs, and these inputs.
DIFFERENTIABLE = {
    "npu_rms_norm_backward": (lambda x, w: npu.npu_rms_norm(x, w, 0.1)[0], [rand(3, 4), rand(4)]),
    "npu_rms_norm_backward, two dims": (lambda x, w: npu.npu_rms_norm(x, w, 0.1)[0], [rand(2, 3, 4), rand(3, 4)]),
    "npu_swiglu_backward": (npu.npu_swiglu, [rand(2, 6)]),
    "npu_swiglu_backward, first dim": (lambda x: npu.npu_swiglu(x, 0), [rand(4, 3)]),
    "npu_geglu_grad": (lambda x: npu.npu_geglu(x)[0], [rand(2, 6)]),
    "npu_geglu_grad, erf, left": (lambda x: npu.npu_geglu(x, -1, 0, True)[0], [rand(2, 6)]),
    "npu_silu_backward": (npu.npu_silu, [rand(3, 4)]),
    "npu_gelu_backward": (lambda x: npu.npu_gelu(x, approximate="tanh"), [rand(3, 4)]),
    "npu_rotary_mul_backward": (npu.npu_rotary_mul, [rand(2, 3, 5, 4), rand(1, 1, 5, 4), rand(1, 1, 5, 4)]),
    "npu_rotary_mul_backward, interleave": (
        lambda x, cos, sin: npu.npu_rotary_mul(x, cos, sin, "interleave"),
        [rand(5, 3, 4), rand(5, 1, 4), rand(5, 1, 4)],
    ),
    "npu_moe_token_permute_grad_v2": (lambda x: npu.npu_moe_token_permute(x, EXPERTS.npu())[0], [rand(4, 3)]),
    "npu_moe_token_permute_grad_v2, some dropped": (
        lambda x: npu.npu_moe_token_permute(x, EXPERTS.npu(), 5)[0],
        [rand(4, 3)],
    ),
    "npu_moe_token_unpermute_grad_v2": (
        lambda x, p: npu.npu_moe_token_unpermute(x, rows_of(EXPERTS).npu(), p),
        [rand(8, 3), rand(4, 2)],
    ),
    "npu_moe_token_unpermute_grad_v2, no weights": (
        lambda x: npu.npu_moe_token_unpermute(x, rows_of(EXPERTS[:, 0]).npu()),
        [rand(4, 3)],
    ),
    "npu_linear_backward": (lambda x, w: npu.npu_linear(x, w), [rand(3, 4), rand(2, 4)]),
    "npu_fusion_attention_grad_v3": (
        lambda q, k, v: npu.npu_fusion_attention_v3(q, k, v, 4, "BNSD", scale=0.5)[0],
        [rand(1, 4, 3, 2), rand(1, 2, 3, 2), rand(1, 2, 3, 2)],
    ),
    "npu_fusion_attention_grad_v3, masked": (
        lambda q, k, v: npu.npu_fusion_attention_v3(q, k, v, 2, "BNSD", atten_mask=MASK.npu(), scale=0.5)[0],
        [rand(1, 2, 3, 2)] * 3,
    ),
    "npu_gather_backward": (lambda x: x.gather(1, torch.tensor([[1, 1], [0, 2]]).npu()), [rand(2, 3)]),
    "repeat_interleave_backward_int": (lambda x: x.repeat_interleave(2, 1), [rand(2, 3, 2)]),
    "repeat_interleave_backward_int, flat": (lambda x: x.repeat_interleave(2), [rand(2, 3)]),
    "repeat_interleave_backward_tensor": (
        lambda x: x.repeat_interleave(torch.tensor([2, 0, 1]).npu(), 1),
        [rand(2, 3, 2)],
    ),
    "aten::matmul_backward": (torch.matmul, [rand(2, 3, 4), rand(4, 5)]),
    "aten::matmul_backward, a vector and a batch": (torch.matmul, [rand(3), rand(2, 3, 2)]),
    "aten::matmul_backward, a batch and a vector": (torch.matmul, [rand(2, 2, 3), rand(3)]),
    "aten::matmul_backward, broadcast": (torch.matmul, [rand(2, 1, 2, 3), rand(3, 3, 2)]),
}


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_the_gradient_is_that_of_the_values(unlimited, name):
    op, inputs = DIFFERENTIABLE[name]
    inputs = [each.to("npu").requires_grad_() for each in inputs]
    unlimited.calls.clear()
    assert torch.autograd.gradcheck(op, inputs, check_undefined_grad=False)
    assert unlimited.calls[name.partition(",")[0]]


def test_a_wrong_gradient_is_seen(unlimited, monkeypatch):
    """The same test with a formula that lacks its last term."""

    def without_the_mean(dy, input, gamma, rstd):  # noqa: A002 - torch_npu's name
        return dy * gamma * rstd, (dy * input * rstd).sum_to_size(gamma.shape)

    monkeypatch.setitem(references(), "npu::npu_rms_norm_backward", without_the_mean)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        test_the_gradient_is_that_of_the_values(unlimited, "npu_rms_norm_backward")


@pytest.mark.parametrize("name", sorted(references()))
def test_arguments_are_those_of_the_op(host_npu, name):
    packet, _, overload = name.partition(".")
    space, _, bare = packet.partition("::")
    schema = getattr(getattr(getattr(torch.ops, space), bare), overload or "default")._schema
    parameters = dict(inspect.signature(references()[name]).parameters)
    takes_more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    arguments = {argument.name: argument for argument in schema.arguments}
    named = {each: value for each, value in parameters.items() if value.kind is not value.VAR_KEYWORD}
    assert named.keys() <= arguments.keys()
    assert takes_more or named.keys() == arguments.keys()
    for each, parameter in named.items():
        argument = arguments[each]
        assert (parameter.default is not parameter.empty) == argument.has_default_value(), each
        assert not argument.has_default_value() or parameter.default == argument.default_value, each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_norm_is_computed_wide_and_rounded_once(host_npu, dtype):
    x, weight = rand(4, 64, dtype=dtype), rand(64, dtype=torch.float32)
    y, rstd = npu.npu_rms_norm(x.npu(), weight.npu(), 1e-6)
    exact = functional.rms_norm(x.double(), (64,), weight.double(), 1e-6)
    assert (y.dtype, rstd.dtype, rstd.shape) == (dtype, torch.float32, (4, 1))
    torch.testing.assert_close(y.cpu().double(), exact.to(dtype).double(), rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_norms_with_more(host_npu):
    x, y, weight = rand(4, 8).float(), rand(4, 8).float(), rand(8).float()
    tensors = [each.npu() for each in (x, y, weight)]
    added, _, total = npu.npu_add_rms_norm(*tensors, 1e-3)
    torch.testing.assert_close(total.cpu(), x + y)
    torch.testing.assert_close(added.cpu(), functional.rms_norm(x + y, (8,), weight, 1e-3))
    one_more = npu.npu_gemma_rms_norm(tensors[0], tensors[2], 1e-3)[0]
    torch.testing.assert_close(one_more.cpu(), functional.rms_norm(x, (8,), 1 + weight, 1e-3))


@pytest.mark.parametrize("interleaved", [True, False])
def test_clipped_swiglu_is_that_of_gpt_oss(host_npu, interleaved):
    x = rand(5, 8).float() * 10
    gate, up = (x[:, ::2], x[:, 1::2]) if interleaved else x.chunk(2, -1)
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    expected = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    groups = torch.tensor([1, 2])
    found = npu.npu_clipped_swiglu(x.npu(), interleaved=interleaved).cpu()
    some = npu.npu_clipped_swiglu(x.npu(), group_index=groups.npu(), interleaved=interleaved).cpu()
    torch.testing.assert_close(found, expected)
    assert torch.equal(some[:3], found[:3])
    assert not some[3:].any()


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def test_rotations_without_gradients(host_npu):
    """Rotations as in DeepSeek's attention, and as in most models' attention."""
    q, cos, sin = (rand(2, 3, 5, 64).half(), *(rand(2, 1, 5, 64).half() for _ in range(2)))
    halves = q.view(2, 3, 5, 32, 2).transpose(4, 3).reshape(q.shape)
    expected = halves.float() * cos.float() + rotate_half(halves).float() * sin.float()
    found = npu.npu_interleave_rope(q.npu(), cos.npu(), sin.npu())
    torch.testing.assert_close(found.cpu(), expected.half())
    q, cos, sin = (each.transpose(1, 2).contiguous() for each in (q, cos, sin))
    expected = q.float() * cos.float() + rotate_half(q).float() * sin.float()
    for found in npu.npu_apply_rotary_pos_emb(q.npu(), q.npu(), cos.npu(), sin.npu()):
        torch.testing.assert_close(found.cpu(), expected.half())


def test_a_rotation_as_a_matrix(host_npu):
    x, cos, sin = rand(2, 3, 5, 16).float(), rand(1, 1, 5, 16).float(), rand(1, 1, 5, 16).float()
    matrix = rotate_half(torch.eye(16))
    tensors = [each.npu() for each in (x, cos, sin)]
    found = npu.npu_rotary_mul(*tensors, "half", matrix.npu())
    torch.testing.assert_close(found.cpu(), npu.npu_rotary_mul(*tensors).cpu())


@pytest.mark.parametrize("mode", ["half", "interleaved"])
@pytest.mark.parametrize("cache", ["default", "interleave"])
def test_rotation_by_three_positions(host_npu, mode, cache):
    """Sections as in Qwen2-VL, one after the other, and as in Qwen3-VL, every third."""
    sections, width, tokens = [8, 4, 4], 32, 6
    positions = torch.stack([torch.arange(tokens), torch.arange(tokens) // 2, torch.arange(tokens) % 2])
    frequencies = 1 / 10000 ** (torch.arange(0, width, 2) / width)
    table = torch.outer(torch.arange(tokens).float(), frequencies)
    kinds = [0] * 8 + [1] * 4 + [2] * 4
    if cache == "interleave":
        kinds = [kind if kind and kind + 3 * (at // 3) < 12 else 0 for at, kind in ((at, at % 3) for at in range(16))]
    angles = torch.stack([table[positions[kind], at] for at, kind in enumerate(kinds)], -1)
    cos, sin = angles.cos(), angles.sin()
    q = rand(tokens, 2 * 64).float()
    heads = q.view(tokens, 2, 64)[..., :width]
    pair = heads.chunk(2, -1) if mode == "half" else (heads[..., ::2], heads[..., 1::2])
    first, second = pair[0] * cos[:, None] - pair[1] * sin[:, None], pair[1] * cos[:, None] + pair[0] * sin[:, None]
    turned = torch.cat((first, second), -1) if mode == "half" else torch.stack((first, second), -1).flatten(-2)
    expected = torch.cat((turned, q.view(tokens, 2, 64)[..., width:]), -1).view(q.shape)
    cache_of_both = torch.cat((table.cos(), table.sin()), -1)
    tensors = [each.npu() for each in (positions, q, q[:, :64].contiguous(), cache_of_both)]
    found, _ = npu.npu_mrope(*tensors, 64, mrope_section=sections, rotary_mode=mode, cache_mode=cache)
    torch.testing.assert_close(found.cpu(), expected)


def test_routing(host_npu):
    x = torch.tensor([[0.0, 1.0, 3.0], [2.0, 1.0, 0.0]])
    weights, experts, rows = npu.npu_moe_gating_top_k_softmax(x.npu(), torch.tensor([False, True]).npu(), 2)
    torch.testing.assert_close(weights.cpu(), x.softmax(-1).sort(descending=True)[0][:, :2])
    assert experts.tolist() == [[2, 1], [3, 3]]
    assert rows.tolist() == [[0, 2], [1, 3]]
    assert (experts.dtype, rows.dtype) == (torch.int32, torch.int32)


def test_permuted_tokens_lie_by_expert_and_come_back_weighted(host_npu):
    tokens, weights = rand(4, 3).float(), torch.rand(4, 2)
    permuted, rows = npu.npu_moe_token_permute(tokens.npu(), EXPERTS.npu())
    order = EXPERTS.flatten().argsort(stable=True)
    assert torch.equal(permuted.cpu(), tokens[order // 2])
    assert torch.equal(rows.cpu(), rows_of(EXPERTS))
    back = npu.npu_moe_token_unpermute(permuted, rows, weights.npu())
    torch.testing.assert_close(back.cpu(), tokens * weights.sum(1, keepdim=True))


def test_a_row_without_weight_is_not_read(host_npu):
    permuted, weights = torch.tensor([[float("nan")], [2.0]]), torch.tensor([[0.0, 1.0]])
    found = npu.npu_moe_token_unpermute(permuted.npu(), torch.tensor([0, 1], dtype=torch.int32).npu(), weights.npu())
    assert found.tolist() == [[2.0]]


GROUPS = torch.tensor([2, 0, 3])
SLICES = [slice(0, 2), slice(2, 2), slice(2, 5)]


PRODUCTS = {
    "mm": torch.mm,
    "matmul": torch.matmul,
    "addmm": lambda a, b: torch.addmm(a, a, b),
    "out": lambda a, b: torch.mm(a, b, out=torch.empty_like(a)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_products_are_computed_wide_and_those_of_integers_are_exact(host_npu, name):
    product = PRODUCTS[name]
    whole = torch.tensor([[(1 << 40) + 1, 3], [5, 7]])
    assert torch.equal(product(whole.npu(), whole.npu()).cpu(), product(whole, whole))
    halves = torch.randn(8, 8).bfloat16()
    expected = product(halves.float(), halves.float()).bfloat16()
    assert torch.equal(product(halves.npu(), halves.npu()).cpu(), expected)


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_of_rows(host_npu, cumulative, dtype):
    """The last group ends before x does: the rows that no kernel writes are NaN."""
    x, weight = rand(7, 8, dtype=dtype), rand(3, 8, 4, dtype=dtype)
    groups = GROUPS.cumsum(0) if cumulative else GROUPS
    how = {"split_item": 2, "group_type": 0, "group_list_type": int(not cumulative), "group_list": groups.npu()}
    (found,) = npu.npu_grouped_matmul([x.npu()], [weight.npu()], **how)
    exact = torch.cat([x[at].double() @ each.double() for at, each in zip(SLICES, weight, strict=True)])
    torch.testing.assert_close(found[:5].cpu(), exact.to(dtype))
    assert found[5:].isnan().all()


def test_products_of_groups_of_what_is_summed_over(host_npu):
    x, upstream = rand(5, 8).float(), rand(5, 4).float()
    how = {"split_item": 3, "group_type": 2, "group_list_type": 1, "group_list": GROUPS.npu()}
    (found,) = npu.npu_grouped_matmul([x.npu().T], [upstream.npu()], **how)
    torch.testing.assert_close(found.cpu(), torch.stack([x[at].T @ upstream[at] for at in SLICES]))
    assert not found[1].any()
    total = torch.ones(24, 4).npu()
    npu.npu_grouped_matmul_add_(total, x.npu(), upstream.npu(), GROUPS.cumsum(0).npu())
    torch.testing.assert_close(total.cpu().view(3, 8, 4), 1 + found.cpu())


def test_products_of_lists(unlimited):
    x, weights, biases = (
        [rand(n, 8).float() for n in (2, 3)],
        [rand(8, 4).float() for _ in range(2)],
        rand(2, 4).float(),
    )
    expected = [a @ b + c for a, b, c in zip(x, weights, biases, strict=True)]
    lists = [[each.npu() for each in tensors] for tensors in (x, weights)]
    apart = npu.npu_grouped_matmul(*lists, bias=[each.npu() for each in biases], group_type=-1)
    for one, other in zip(apart, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other)
    (whole,) = npu.npu_grouped_matmul([torch.cat(x).npu()], lists[1], group_list=[2, 5], split_item=3, group_type=0)
    torch.testing.assert_close(whole.cpu(), torch.cat(expected) - biases.repeat_interleave(torch.tensor([2, 3]), 0))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_torch(host_npu, causal):
    tensors = [rand(2, 4, 5, 8).float() for _ in range(3)]
    ours, theirs = ([each.to(device).requires_grad_() for each in tensors] for device in ("npu", "cpu"))
    for each in (ours, theirs):
        functional.scaled_dot_product_attention(*each, is_causal=causal).square().sum().backward()
    assert host_npu.calls["npu_fusion_attention_grad_v3"]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad.cpu(), other.grad)


def test_attention_with_dropout(host_npu):
    """The mask is drawn anew in each call, from the NPU's generator, and the backward draws the same mask again."""
    value = torch.eye(64, device="npu").expand(1, 1, 64, 64).requires_grad_()
    query = torch.randn(1, 1, 64, 8, device="npu")
    of_cpu = torch.get_rng_state()
    first, second = (functional.scaled_dot_product_attention(query, query, value, dropout_p=0.25) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), of_cpu)
    weights = first.detach().cpu()[0, 0]
    assert 0.6 < weights.count_nonzero() / weights.numel() < 0.9
    (gradient,) = torch.autograd.grad(first.sum(), value)
    torch.testing.assert_close(gradient.cpu()[0, 0], weights.sum(0)[:, None].expand(64, 64))


def test_dropout_keeps_what_its_gradient_keeps(host_npu):
    x = torch.ones(4096, device="npu", requires_grad=True)
    y = functional.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())
    assert y.cpu().unique().tolist() == [0, pytest.approx(4 / 3)]
    assert y.mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("name", ["npu_dtype_cast", "_npu_dtype_cast"])
def test_casts(host_npu, name):
    x = torch.ones(3, device="npu", requires_grad=True)
    y = getattr(npu, name)(x, torch.bfloat16)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, x.grad.tolist()) == (torch.bfloat16, torch.float32, [1, 1, 1])


def test_somebody_elses_op(host_npu, monkeypatch):
    """Somebody else's op is computed by its reference, and counted."""
    monkeypatch.setitem(references(), "reference_of_mine::double", None)  # so that the entry is gone after this test
    library = torch.library.Library("reference_of_mine", "DEF")
    try:
        library.define("double(Tensor x) -> Tensor")

        @reference("reference_of_mine::double")
        def double(x):
            assert x.device.type == "cpu"
            return x * 2

        assert torch.ops.reference_of_mine.double(torch.ones(2).npu()).tolist() == [2, 2]
        assert host_npu.calls["reference_of_mine::double"] == 1
    finally:
        library._destroy()
