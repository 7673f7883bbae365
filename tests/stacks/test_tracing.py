"""Fused models that are exported or transformed with torch.func, with all kernels in place."""

import io

import pytest
import torch
import transformers
from support.thorough import thorough
from support.tiny import build, inputs

from fuseplug import KernelManager


def fused(model_type, *ops):
    model = build(model_type)
    applied = KernelManager().apply_all(model, include=[f"inductor_fused_{op}" for op in ops], verify=False)
    assert {entry.op for entry in applied.report.fused} == set(ops)
    return model, applied


@thorough
@pytest.mark.skipif(transformers.__version__ < "5", reason="it loops over the experts in use, unfused, too")
@pytest.mark.parametrize(("part", "strict"), [("layers.0.mlp", True), ("", True), ("", False)])
def test_an_exported_mixture_needs_nothing_of_ours(part, strict):
    model, _ = fused("qwen3_moe", "rmsnorm", "rope", "moe")
    module, x = model.model.get_submodule(part), torch.randn(2, 12, 64)
    given = {"hidden_states": x} if part else {"inputs_embeds": x, "use_cache": False}
    with torch.no_grad():
        want = module(**given)
        program = torch.export.export(module, (), given, strict=strict)
    file = io.BytesIO()
    torch.export.save(program, file)
    names = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in names if "fuseplug" in name]
    file.seek(0)
    found = torch.export.load(file).module()(**given)
    torch.testing.assert_close(found if part else found[0], want if part else want[0])


def test_a_mixture_under_vmap_is_that_of_each_row():
    model, _ = fused("qwen3_moe", "moe")
    block = model.model.layers[0].mlp
    x = torch.randn(3, 2, 5, 64)

    def output(x):
        found = block(x)
        return found[0] if isinstance(found, tuple) else found

    want = torch.stack([output(each) for each in x])
    torch.testing.assert_close(torch.func.vmap(output)(x), want)
    torch.testing.assert_close(
        torch.func.grad(lambda x: torch.func.vmap(output)(x).sum())(x),
        torch.func.grad(lambda x: sum(output(each).sum() for each in x))(x),
    )


def test_other_parameters_for_one_call_are_used():
    model, applied = fused("qwen3", "rmsnorm", "swiglu", "rope")
    plain, given = build("qwen3"), inputs(model)
    other = {name: each.detach() * 1.01 for name, each in plain.named_parameters()}
    want = torch.func.functional_call(plain, other, (), given).logits
    torch.testing.assert_close(torch.func.functional_call(model, other, (), given).logits, want)
    assert all(calls.fused and not calls.original for calls in applied.calls())
