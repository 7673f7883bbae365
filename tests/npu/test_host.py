"""The stand-in behaves like an NPU: for numbers, gradients, threads, compilers, random numbers and files."""

import copy
import io
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fuseplug_host_npu import HostNPU

npu = torch.ops.npu


class TestNumbers:
    @pytest.mark.parametrize(
        "compute",
        [
            lambda x: x.softmax(-1) @ x.T,
            lambda x: functional.rms_norm(x, (6,)),
            lambda x: functional.layer_norm(x, (6,)),
            lambda x: x.sort()[0].cumsum(0),
            lambda x: x.view(2, 2, 6).transpose(0, 1).contiguous(),
            lambda x: functional.cross_entropy(x, torch.tensor([0, 1, 2, 3], device=x.device)),
            lambda x: functional.one_hot(x.argmax(-1), 6),
            lambda x: x[x > 0],
            lambda x: x.to(torch.bfloat16).float().clamp(min=0).std(),
            lambda x: torch.complex(x, x).conj().imag,
            lambda x: x.unique(),
            lambda x: torch.bincount((x > 0).long().flatten()),
            lambda x: (x * 4).histc(4, 0, 4),
            lambda x: functional.pad(x, (1, 1)).roll(1),
        ],
    )
    def test_those_of_the_cpu(self, host_npu, compute):
        x = torch.randn(4, 6)
        found = compute(x.to("npu"))
        assert found.device == torch.device("npu", 0)
        torch.testing.assert_close(found.cpu(), compute(x), rtol=1e-5, atol=1e-6)

    def test_in_place_through_views(self, host_npu):
        for device in ("cpu", "npu"):
            x = torch.zeros(4, 4, device=device)
            x[1].add_(1)
            x[:, 2] = 5
            x.t()[0].mul_(2)
            x[x > 4] = 7
            assert x.tolist() == [[0, 0, 7, 0], [2, 1, 7, 1], [0, 0, 7, 0], [0, 0, 7, 0]]

    def test_into_a_tensor_of_whatever_size_and_strides(self, host_npu):
        ones = torch.ones(2, 2, device="npu")
        out = torch.empty(3, device="npu")
        assert torch.mm(ones, ones, out=out) is out
        assert out.tolist() == [[2, 2], [2, 2]]

    def test_nothing_is_written_after_an_op_has_returned(self, host_npu):
        ones = torch.ones(2, 2, device="npu")
        for _ in range(300):
            out = torch.empty(3, device="npu")
            torch.mm(ones, ones, out=out)  # the memory of `out` grows, and its contents are copied
            assert out.tolist() == [[2, 2], [2, 2]]
        whole = torch.zeros(2, 4, device="npu")
        torch.add(ones, 1, out=whole[:, ::2])
        assert whole.tolist() == [[2, 0, 2, 0]] * 2

    def test_of_integers_which_the_cpu_does_not_count(self, host_npu):
        assert torch.tensor([0, 2, 2], device="npu").histc(3, 0, 2).tolist() == [1, 0, 2]

    def test_of_nothing(self, host_npu):
        none = torch.empty(0, 4, device="npu")
        assert (none + 1).shape == (0, 4)
        assert (none.T @ none).tolist() == [[0] * 4] * 4


class TestGradients:
    def test_by_the_formulas_of_torch_npu(self, host_npu):
        x, weight = torch.randn(5, 8), torch.rand(8)
        ours, theirs = ([each.to(device).requires_grad_() for each in (x, weight)] for device in ("npu", "cpu"))
        npu.npu_rms_norm(*ours, 1e-6)[0].square().sum().backward()
        functional.rms_norm(theirs[0], (8,), theirs[1], 1e-6).square().sum().backward()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad)
        assert host_npu.calls["npu_rms_norm"] == host_npu.calls["npu_rms_norm_backward"] == 1

    def test_none_where_torch_npu_has_none(self, host_npu):
        x, weight = (torch.ones(*shape, device="npu", requires_grad=True) for shape in ((4, 8), (2, 8, 4)))
        counts = torch.tensor([1, 3], device="npu")
        how = {"split_item": 2, "group_type": 0, "group_list_type": 1, "group_list": counts}
        y = npu.npu_grouped_matmul([x], [weight], **how)[0]
        assert torch.autograd.grad(y.sum(), [x, weight], allow_unused=True) == (None, None)
        with pytest.raises(RuntimeError, match="npu_add_rms_norm is not implemented"):
            npu.npu_add_rms_norm(x, x, torch.ones(8, device="npu"))[0].sum().backward()

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_with_checkpointing_that_draws_the_same_again(self, host_npu, reentrant):
        x = torch.randn(4, 8, device="npu", requires_grad=True)

        def forward(x):
            return functional.dropout(npu.npu_swiglu(x), 0.5)

        def again(x):
            return checkpoint(forward, x, use_reentrant=reentrant)

        found = []
        for run in (forward, again):
            torch.npu.manual_seed(1)
            run(x).sum().backward()
            found.append(x.grad)
            x.grad = None
        assert torch.equal(*found)

    def test_clipped_scaled_and_stepped_on(self, host_npu):
        model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 1))
        ends = []
        for device, options in (("cpu", {}), ("npu", {}), ("npu", {"foreach": False}), ("npu", {"fused": True})):
            trained = copy.deepcopy(model).to(device)
            optimizer = torch.optim.AdamW(trained.parameters(), lr=0.1, **options)
            for step in range(3):
                trained(torch.full((2, 4), step + 1.0, device=device)).square().mean().backward()
                nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            ends.append(trained(torch.ones(2, 4, device=device)).cpu())
        for end in ends[1:]:
            torch.testing.assert_close(end, ends[0])

    def test_under_autocast(self, host_npu):
        layer, x = nn.Linear(4, 4).to("npu"), torch.randn(2, 4, device="npu")
        with torch.autocast("npu", torch.bfloat16):
            y = layer(x)
        y.sum().backward()
        assert (y.dtype, layer.weight.grad.dtype) == (torch.bfloat16, torch.float32)


class TestOneDevice:
    def test_memory_of_the_host_is_another(self, host_npu):
        x = torch.ones(2, device="npu")
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            x + torch.ones(2)
        with pytest.raises(RuntimeError, match=r"npu_rms_norm.* but found npu:0 and cpu"):
            npu.npu_rms_norm(x.expand(3, 2), torch.ones(2))
        assert (x + torch.tensor(1.0)).tolist() == [2, 2]

    def test_a_generator_of_the_host_is_another(self, host_npu):
        with pytest.raises(RuntimeError, match="Expected a 'npu' device type for generator but found 'cpu'"):
            torch.randn(2, device="npu", generator=torch.Generator())


class TestRandomNumbers:
    def test_come_from_the_generator_of_the_npu(self, host_npu):
        torch.npu.manual_seed(3)
        state, of_cpu = torch.npu.get_rng_state(), torch.get_rng_state()
        first, second = torch.randn(4, device="npu"), torch.randn(4, device="npu")
        assert not torch.equal(first, second)
        torch.npu.set_rng_state(state)
        assert torch.equal(torch.randn(4, device="npu"), first)
        torch.manual_seed(3)
        assert torch.equal(torch.randn(4, device="npu"), first)
        torch.set_rng_state(of_cpu)
        torch.rand(4, device="npu")
        assert torch.equal(torch.get_rng_state(), of_cpu)

    def test_from_one_of_their_own(self, host_npu):
        generator = torch.Generator("npu").manual_seed(3)
        before = torch.npu.get_rng_state()
        first = torch.rand(4, device="npu", generator=generator)
        generator.manual_seed(3)
        assert torch.equal(torch.rand(4, device="npu", generator=generator), first)
        assert torch.equal(torch.npu.get_rng_state(), before)

    def test_of_every_kind(self, host_npu):
        x = torch.ones(1000, device="npu")
        for drawn in (
            functional.dropout(x),
            torch.bernoulli(x / 2),
            torch.empty_like(x).bernoulli_(0.5),
            torch.empty_like(x).exponential_(),
            torch.randint(0, 9, (1000,), device="npu"),
            torch.randperm(1000, device="npu"),
            torch.multinomial(x, 3),
            torch.normal(x, x),
        ):
            assert drawn.unique().numel() > 1


class TestTheWholeProcess:
    def test_in_every_thread(self, host_npu):
        found = []

        def work():
            x = torch.ones(2, 4, device="npu", requires_grad=True)
            npu.npu_swiglu(x).sum().backward()
            found.append(x.grad.sum().item())

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(found)) == 1
        assert len(found) == 4
        assert host_npu.calls["npu_swiglu_backward"] == 4

    def test_one_within_another_counts_for_both(self, host_npu):
        with HostNPU() as inner:
            torch.ones(2, device="npu") + 1
        torch.ones(2, device="npu") + 1
        assert (host_npu.calls["aten::add"], inner.calls["aten::add"]) == (2, 1)

    def test_an_op_without_a_reference_says_what_to_do(self, host_npu):
        with pytest.raises(NotImplementedError, match=r'npu_mish.*has no reference.*reference\("npu::npu_mish"\)'):
            npu.npu_mish(torch.ones(2, device="npu"))


class TestCompilers:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_ops_are_traced_and_run(self, host_npu, backend):
        x, weight = torch.randn(4, 8, device="npu", requires_grad=True), torch.ones(8, device="npu")

        def function(x):
            return npu.npu_rms_norm(x * 2, weight, 1e-6)[0].square()

        compiled = torch.compile(function, backend=backend, fullgraph=True)
        found, expected = (torch.autograd.grad(each(x).sum(), x)[0] for each in (compiled, function))
        torch.testing.assert_close(found, expected)
        assert host_npu.calls["npu_rms_norm_backward"] == 2

    def test_opcheck(self, host_npu):
        torch.library.opcheck(npu.npu_swiglu.default, (torch.randn(4, 8, device="npu"),))

    def test_function_transforms(self, host_npu):
        x = torch.arange(3.0, device="npu")
        assert torch.func.vmap(lambda x: x * 2)(x).tolist() == [0, 2, 4]
        assert torch.func.grad(lambda x: (x * x).sum())(x).tolist() == [0, 2, 4]

    def test_fake_tensors_beside_real_ones(self, host_npu, fake_npu):
        x = torch.empty(2, 8, device="npu", requires_grad=True)
        npu.npu_swiglu(x).sum().backward()
        assert x.grad.shape == (2, 8)
        assert not host_npu.calls["npu_swiglu"]


class TestFiles:
    def test_saved_loaded_copied_and_printed(self, host_npu):
        layer = nn.Linear(3, 3).to("npu")
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        for location in (None, "cpu"):
            file.seek(0)
            loaded = torch.load(file, map_location=location)
            assert loaded["weight"].device.type == (location or "npu")
            assert torch.equal(loaded["weight"].cpu(), layer.weight.cpu())
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other.weight, layer.weight)
            assert other.weight.data_ptr() != layer.weight.data_ptr()
        assert "device='npu:0'" in repr(layer.weight)


def test_shapes_alone_will_do(fake_npu):
    """A layer of experts of a model with 671 billion parameters takes no memory."""
    tokens = torch.empty(4 * 4096, 7168, device="npu", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(7168, device="npu", requires_grad=True)
    indices = torch.empty(4 * 4096, 8, device="npu", dtype=torch.int32)
    normed = npu.npu_rms_norm(tokens, weight)[0]
    permuted, rows = npu.npu_moe_token_permute(normed, indices)
    assert permuted.shape == (8 * 4 * 4096, 7168)
    weights = torch.empty(4 * 4096, 8, device="npu", dtype=torch.bfloat16, requires_grad=True)
    npu.npu_moe_token_unpermute(permuted, rows, weights).sum().backward()
    for tensor in (tokens, weight, weights):
        assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)
