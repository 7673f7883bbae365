"""Packed sequences, which transformers' functions refuse, are computed one by one once the user consents."""

import pytest
import torch
import transformers
from support.delta_rules import MODELS
from support.parity import distance
from support.thorough import first_quick
from support.tiny import build

from fuseplug import KernelManager, Target
from fuseplug_causal_conv1d.recognise.structure import tells_of_packed_sequences
from fuseplug_causal_conv1d.specimens import causal_conv1d_fn
from fuseplug_gated_delta_rule.specimens import GatedDeltaNet, Mixer, chunk_gated_delta_rule

pytestmark = pytest.mark.usefixtures("small_checks")

LENGTHS = [7, 1, 12]
TOKENS = sum(LENGTHS)
NUMBERS = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(LENGTHS)).unsqueeze(0)
BOUNDS = torch.tensor([0, 7, 8, 20], dtype=torch.int32)
PACKED = {"seq_idx": NUMBERS, "cu_seqlens": BOUNDS}
ALLOW = {"allow": ["packed_sequences"]}


@pytest.fixture(scope="module")
def manager():
    kernels = "inductor_fused_gated_delta_rule,inductor_fused_causal_conv1d"
    return KernelManager(environ={"FUSEPLUG_KERNELS": kernels})


@pytest.mark.skipif(transformers.__version__ < "5", reason="there the functions are attributes of the modules")
@pytest.mark.parametrize("name", first_quick(["qwen3_next", "kimi_linear", "qwen3_5_text"], 2))
def test_a_model_computes_each_sequence_as_by_itself(manager, name):
    model = build(name, torch.float32, **MODELS[name][0]).train()
    ids = torch.randint(3, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).unsqueeze(0)
    how = {"position_ids": positions, "use_cache": False, "seq_idx": NUMBERS}
    bounds = {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 12, "max_length_k": 12}

    def gradients(logits):
        (logits.square() * torch.arange(1.0, TOKENS + 1).unsqueeze(-1)).sum().backward()
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    alone = torch.cat([model(part, use_cache=False).logits for part in ids.split(LENGTHS, 1)], 1)
    expected = gradients(alone)
    with manager.apply_all(model, verify=False), pytest.raises(ValueError, match="can't keep packed sequences apart"):
        model(ids, **how, **bounds)
    with manager.apply_all(model, **ALLOW) as applied:
        assert sum(bool(entry.gives_up) for entry in applied.report.fused) == 2, applied.report
        for keywords in (how, how | bounds):
            logits = model(ids, **keywords).logits
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
            for key, gradient in gradients(logits).items():
                # In transformers' own functions, the gradients of decays lose a digit or two.
                assert distance(gradient, expected[key]) <= 1e-3, key
        if MODELS[name][1] == "head":  # Kimi Delta Attention is not told of these bounds
            with pytest.raises(ValueError, match="can't keep packed sequences apart"):
                model(ids, position_ids=positions, use_cache=False, **bounds)


@pytest.mark.parametrize("module", [GatedDeltaNet()])
def test_calls_that_do_not_say_where_sequences_begin_are_the_originals(manager, module):
    hidden = torch.randn(2, TOKENS, 8)
    state = torch.zeros(1, 2, 4, 4)
    refused = [
        (hidden[:1], {"cu_seqlens": BOUNDS}),
        (hidden[:1], PACKED | {"cu_seqlens": BOUNDS[:-1]}),
        (hidden[:1], PACKED | {"cu_seqlens": BOUNDS + 1}),
        (hidden[:1], PACKED | {"seq_idx": NUMBERS[:, 1:]}),
        (hidden[:1], PACKED | {"seq_idx": LENGTHS}),
        (hidden, PACKED | {"seq_idx": NUMBERS.expand(2, -1)}),
        (hidden[:1], PACKED | {"state": state}),
        (hidden[:1], PACKED | {"output_final_state": True}),
    ]
    with manager.apply_all(module, **ALLOW) as applied:
        for x, how in refused:
            with pytest.raises(ValueError, match="cannot be kept apart"):
                module(x, **how)
        assert applied.calls()[0].fused == 0
        packed = module(hidden[:1], **PACKED)
        assert applied.calls()[0].fused == 1
        alone = torch.cat([module(part) for part in hidden[:1].split(LENGTHS, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-6)


class Telling(Mixer):
    def forward(self, x, weight, **kwargs):
        x = causal_conv1d_fn(x, weight, **kwargs)
        return chunk_gated_delta_rule(*self.project(x), **kwargs)


class Silent(Mixer):
    """Does not tell the rule what it was told itself."""

    def forward(self, x, weight, **kwargs):
        x = causal_conv1d_fn(x, weight, **kwargs)
        return chunk_gated_delta_rule(*self.project(x))


class OfAnother(Mixer):
    def forward(self, x, weight, **kwargs):
        return causal_conv1d_fn(x, weight, **kwargs).cumsum(-1)


@pytest.mark.parametrize(("cls", "tells"), [(Telling, True), (Silent, False), (OfAnother, False)])
def test_a_convolution_keeps_sequences_apart_only_if_the_rule_behind_it_is_told(cls, tells):
    assert tells_of_packed_sequences(cls, Target("forward", "causal_conv1d_fn")) is tells
