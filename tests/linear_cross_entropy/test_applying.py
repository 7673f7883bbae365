"""What `apply_all` does with a loss head, on each backend."""

import pytest
import torch
from support.thorough import few_on

from fuseplug_linear_cross_entropy.specimens import VOCABULARY, Softcapped

pytestmark = pytest.mark.usefixtures("small_checks")


@pytest.mark.parametrize("dtype", few_on("triton", [torch.float32, torch.bfloat16], 0), ids=str)
def test_a_loss_head_is_fused_and_learns_what_it_did(backend, dtype):
    backend.module("linear_cross_entropy")
    model = Softcapped().to(backend.device, dtype)
    tokens = torch.randint(VOCABULARY, (2, 9)).to(backend.device)

    def train():
        model.zero_grad()
        loss = model(tokens, tokens)[0]
        loss.backward()
        return [loss.detach().float(), *(parameter.grad.float() for parameter in model.parameters())]

    expected = train()
    with backend.manager("linear_cross_entropy").apply_all(model, allow=["lazy_logits"]) as applied:
        (entry,) = applied.report.fused
        assert (entry.kernel_id, entry.check) == (f"{backend.name}_fused_linear_cross_entropy", "passed")
        backend.clear()
        results = train()
        assert backend.launches or backend.host.calls["aten::scatter_add_"]
    close = {} if dtype is torch.float32 else {"rtol": 0.05, "atol": 0.02}
    torch.testing.assert_close(results, expected, **close)
