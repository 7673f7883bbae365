"""Rotary functions are found where they are called, and their variants by what they compute."""

import functools
import importlib
import sys

import pytest
import torch
from support.thorough import covering, thorough
from torch import nn

from fuseplug import Rejection, Site, Target
from fuseplug.patching.placing import Placing
from fuseplug.patching.replacement import replacement_of
from fuseplug_rope import reference, specimens
from fuseplug_rope.kernels import RoPEKernel
from fuseplug_rope.recognise.structure import match
from fuseplug_rope.specimens import halves, pairs, signatures, tables_of_planes, without_functions
from fuseplug_rope.specimens.attention import Attention
from fuseplug_rope.specimens.turns import rotate_half

pytestmark = pytest.mark.usefixtures("small_checks")

# directory, class, function, variant
TRANSFORMERS = [
    ("llama", "LlamaAttention", "apply_rotary_pos_emb", "half"),
    ("gpt_neox", "GPTNeoXAttention", "apply_rotary_pos_emb", "half-partial"),
    ("qwen2_vl", "VisionAttention", "apply_rotary_pos_emb_vision", "half-vision"),
    ("olmo2", "Olmo2Attention", "apply_rotary_pos_emb", "half-promoting"),
    ("modernbert", "ModernBertAttention", "apply_rotary_pos_emb", "half-wide"),
    ("hunyuan_vl", "HunYuanVLDenseV1Attention", "apply_rotary_pos_emb", "half-wide-tables"),
    ("gpt_oss", "GptOssAttention", "apply_rotary_pos_emb", "half-size"),
    ("nanochat", "NanoChatAttention", "apply_rotary_pos_emb", "half-negated"),
    ("blt", "BltSelfAttention", "apply_rotary_pos_emb", "interleaved"),
    ("glm4v", "Glm4vTextAttention", "apply_rotary_pos_emb", "interleaved-partial"),
    ("cohere", "CohereAttention", "apply_rotary_pos_emb", "interleaved-wide"),
    ("sam3", "Sam3ViTRoPEAttention", "apply_rotary_pos_emb_2d", "interleaved-wide-own"),
    ("inkling2", "Inkling2VisionAttention", "apply_rotary_pos_emb_vision", "interleaved-vision"),
    ("ernie4_5_vl_moe", "Ernie4_5_VLMoeTextAttention", "apply_rotary_pos_emb", "interleaved-wide-twice"),
    ("helium", "HeliumAttention", "apply_rotary_pos_emb", "interleaved-first-half"),
    ("glm4", "Glm4Attention", "apply_rotary_pos_emb", "interleaved-first-half-partial"),
    ("ernie4_5", "Ernie4_5Attention", "apply_rotary_pos_emb", "interleaved-first-half-wide"),
    ("gptj", "GPTJAttention", "apply_rotary_pos_emb", "interleaved-repeated"),
    ("deepseek_v4", "DeepseekV4Attention", "apply_rotary_pos_emb", "interleaved-trailing"),
    ("openai_privacy_filter", "OpenAIPrivacyFilterAttention", "apply_rotary_pos_emb", "interleaved-half-size"),
    ("pe_audio", "PeAudioEncoderAttention", "apply_rotary_pos_emb", "interleaved-matrix"),
    ("llama4", "Llama4TextAttention", "apply_rotary_emb", "complex"),
    ("longcat_flash", "LongcatFlashMLA", "apply_rotary_pos_emb_interleave", "mla"),
    ("gemma3n", "Gemma3nTextAttention", "apply_rotary_pos_emb", "half"),
    ("clvp", "ClvpSelfAttention", "apply_rotary_pos_emb", "half"),
    ("dinov3_vit", "DINOv3ViTAttention", "apply_rotary_pos_emb", "half"),
    ("muse_glimmer_assistant", "MuseGlimmerAssistantAttention", "apply_rotary_pos_emb", "half"),
    ("qwen4_exp", "Qwen4ExpTextAttention", "apply_rotary_pos_emb", "half-partial"),
    ("qwen2_5_vl", "Qwen2_5_VLAttention", "apply_multimodal_rotary_pos_emb", "half"),
]
OTHERWISE_BEFORE = {"longcat_flash": "mla-full-table"}
"""Variants in transformers 4.57, where the function is written in another way."""

SPECIMENS = {
    "Half": "half",
    "Partial": "half-partial",
    "Vision": "half-vision",
    "Promoting": "half-promoting",
    "WideTwice": "half-wide",
    "WideTables": "half-wide-tables",
    "HalfSize": "half-size",
    "Negated": "half-negated",
    "Interleaved": "interleaved",
    "InterleavedPartial": "interleaved-partial",
    "InterleavedWide": "interleaved-wide",
    "InterleavedWideOwn": "interleaved-wide-own",
    "InterleavedVision": "interleaved-vision",
    "InterleavedWideTwice": "interleaved-wide-twice",
    "FirstHalf": "interleaved-first-half",
    "FirstHalfPartial": "interleaved-first-half-partial",
    "FirstHalfWide": "interleaved-first-half-wide",
    "SinFirst": "interleaved-repeated",
    "Trailing": "interleaved-trailing",
    "HalfSizePairs": "interleaved-half-size",
    "Matrix": "interleaved-matrix",
    "Complex": "complex",
    "PartialMethod": "half-partial",
    "HalfSizeNegated": "half-size-negated",
    "HalfSizePairsWide": "interleaved-half-size-wide",
    "PairsInOneTable": "interleaved-half-size-partial",
    "ModuleOfHalves": "half-size-negated-wide",
    "ModuleOfPairs": "interleaved-half-size-wide",
    "ModuleOfComplexNumbers": "complex",
    "ModuleOfHeadsFirst": "half",
    "Latent": "mla",
    "LatentFullTable": "mla-full-table",
    **dict.fromkeys(("Single", "Gathering", "Sections", "Patches", "Unpaired", "OwnMethod"), "half"),
}


def bare(cls):
    """An instance without the attributes from its config: the class alone tells what its methods call."""
    module = object.__new__(cls)
    nn.Module.__init__(module)
    return module


def found(report):
    return {entry.target.function or entry.target.method: entry.variant for entry in report.fused}


def calls_as_global(function, monkeypatch):
    """A module whose forward looks up *function*."""
    monkeypatch.setattr(sys.modules[__name__], "rotary", function)
    return Calling()


class Calling(nn.Module):
    def forward(self, *tensors, **options):
        return rotary(*tensors, **options)


class CallingEitherWay(nn.Module):
    def forward(self, *tensors, sequence_first=False):
        return rotary(*tensors, unsqueeze_dim=2) if sequence_first else rotary(*tensors)


def rotary(q, k, cos, sin):
    raise NotImplementedError


def right(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def tensors(dtype=torch.float32, heads=(3, 2)):
    generator = torch.Generator().manual_seed(0)
    shapes = [*((2, h, 5, 16) for h in heads), (2, 5, 16), (2, 5, 16)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("model", "name", "function", "variant"),
    covering(TRANSFORMERS, by=lambda model, name, function, variant: [variant]),
)
def test_exactly_the_right_variant_of_a_function_of_transformers_is_found(manager, model, name, function, variant):
    transformers = pytest.importorskip("transformers")
    try:
        modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
        calling = getattr(modeling, name)
    except (ImportError, AttributeError):
        pytest.skip(f"this version of transformers has no {name}")
    if not hasattr(modeling, function):
        pytest.skip(f"{function} is of another version of transformers")
    if transformers.__version__ < "5":
        if model in ("glm4v", "modernbert"):
            pytest.skip("in transformers 4.57 its methods call another function")
        variant = OTHERWISE_BEFORE.get(model, variant)
    assert found(manager.plan(bare(calling), verify=False).report)[function] == variant


@pytest.mark.parametrize("module", specimens.specimens(), ids=lambda module: type(module).__name__)
def test_each_specimen_is_found_and_computes_what_it_did_bit_for_bit(manager, module):
    x = torch.randn(2, 5, 8)
    before = module(x)
    with manager.apply_all(module, verify=False) as applied:
        assert list(found(applied.report).values()) == [SPECIMENS[type(module).__name__]], applied.report
        during = module(x)
    for ours, theirs in zip(*(y if isinstance(y, tuple) else (y,) for y in (during, before)), strict=True):
        assert torch.equal(ours, theirs)


def test_every_variant_of_the_table_has_a_specimen():
    assert set(SPECIMENS.values()) == set(reference.VARIANTS)
    assert set(SPECIMENS) == {type(module).__name__ for module in specimens.specimens()}


class Both(Attention):
    def forward(self, hidden_states):
        states = self.states(hidden_states)
        return right(*states), other_right(*states)


other_right = pairs.pairs_rotary


def test_several_functions_in_one_method_are_several_targets(manager):
    report = manager.plan(Both()).report
    assert found(report) == {"right": "half", "other_right": "interleaved"}


@pytest.mark.parametrize("dim", [0, 1, 2, -2, -3])
def test_unsqueeze_dim_by_position_and_by_keyword(manager, monkeypatch, dim):
    module = calls_as_global(right, monkeypatch)
    q, k, cos, sin = tensors()
    if dim in (2, -2):
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    if dim == 0:
        cos, sin = cos[0], sin[0]
    manager.apply_all(module)
    expected = right(q, k, cos, sin, dim)
    replaced = module.forward.__func__.__wrapped__.__globals__["rotary"]
    for result in (module(q, k, cos, sin, dim), replaced(q, k, cos, sin, dim)):
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def by_place(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    return right(q, k, cos, sin, unsqueeze_dim)


def test_a_fifth_place_that_is_position_ids_is_not_taken_for_a_dimension(manager, monkeypatch):
    module = calls_as_global(by_place, monkeypatch)
    q, k, cos, sin = tensors()
    applied = manager.apply_all(module)
    assert found(applied.report) == {"rotary": "half"}
    expected = right(q, k, cos, sin)
    for rest in ((), (None,), (torch.arange(5).expand(2, 5),), (None, 1)):
        assert all(torch.equal(a, b) for a, b in zip(module(q, k, cos, sin, *rest), expected, strict=True))


def if_given(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    if k is None:
        return signatures.single_rotary(q, cos, sin, unsqueeze_dim)
    return right(q, k, cos, sin, unsqueeze_dim)


def nothing_back(q, k, cos, sin, unsqueeze_dim=1):
    return signatures.single_rotary(q, cos, sin, unsqueeze_dim), None if k is None else right(q, k, cos, sin)[1]


@pytest.mark.parametrize("function", [if_given, nothing_back])
def test_without_k_what_comes_back_has_the_form_it_had(manager, monkeypatch, function):
    module = calls_as_global(function, monkeypatch)
    q, _, cos, sin = tensors()
    expected = function(q, None, cos, sin)
    assert found(manager.apply_all(module).report) == {"rotary": "half"}
    result = module(q, None, cos, sin)
    assert type(result) is type(expected)
    first, *rest = result if isinstance(result, tuple) else (result,)
    assert torch.equal(first, expected[0] if isinstance(expected, tuple) else expected)
    assert rest == ([None] if isinstance(expected, tuple) else [])


def in_a_list(q, k, cos, sin):
    first, second = right(q, k, cos, sin)
    return [first, second]


def test_what_returns_a_list_is_not_given_a_tuple(manager, monkeypatch):
    (entry,) = manager.plan(calls_as_global(in_a_list, monkeypatch)).report.entries
    assert "instead of [Tensor, Tensor]" in entry.why_not


def first_half_only(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (torch.cat((table[..., :8], table[..., :8]), -1) for table in (cos, sin))
    return right(q, k, cos, sin, unsqueeze_dim)


def test_tables_whose_halves_differ_tell_what_reads_one_half_from_what_reads_both(manager, monkeypatch):
    (entry,) = manager.plan(calls_as_global(first_half_only, monkeypatch)).report.entries
    assert entry.rejections[0][1].kind == "unlike"


counter = 0
log = []


def counts(q, k, cos, sin, unsqueeze_dim=1):
    global counter
    counter += 1
    return right(q, k, cos, sin, unsqueeze_dim)


def prints(q, k, cos, sin, unsqueeze_dim=1):
    print("rotating")
    return right(q, k, cos, sin, unsqueeze_dim)


def logs(q, k, cos, sin, unsqueeze_dim=1):
    log.append(q.shape)
    return right(q, k, cos, sin, unsqueeze_dim)


def marks(q, k, cos, sin, unsqueeze_dim=1):
    q.rotated = True
    return right(q, k, cos, sin, unsqueeze_dim)


def calls_one_that_counts(q, k, cos, sin, unsqueeze_dim=1):
    return counts(q, k, cos, sin, unsqueeze_dim)


def variadic_rotary(*args):
    return right(*args)


def scaled(q, k, cos, sin, scale):
    return right(q * scale, k, cos, sin)


def only_by_keyword(q, k, *, cos, sin):
    return right(q, k, cos, sin)


def nothing_to_rotate(cos, sin):
    return cos, sin


def raises(q, k, cos, sin):
    raise ValueError("needs a permit")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (counts, r"it does more than compute: global counter \(line \d+ of counts\)"),
        (prints, r"it does more than compute: print\('rotating'\)"),
        (logs, r"it does more than compute: log.append\(q.shape\)"),
        (marks, "it does more than compute: q.rotated = True"),
        (calls_one_that_counts, r"it does more than compute: global counter \(line \d+ of counts\)"),
        (variadic_rotary, r"unknown signature: \*args cannot be given by position"),
        (scaled, "unknown signature: what 'scale' is for is not known"),
        (only_by_keyword, "unknown signature: .*cos.* cannot be given by position"),
        (nothing_to_rotate, "unknown signature: q and k, or one tensor, then cos and sin, are expected"),
        (raises, "takes none of the known forms .*ValueError: needs a permit"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_side_effects_and_unknown_signatures_are_rejected_with_the_reason(manager, monkeypatch, function, reason):
    module = calls_as_global(function, monkeypatch)
    with manager.apply_all(module) as applied:
        (entry,) = applied.report.left_alone
        assert not applied.report.fused
        assert "forward" not in vars(module)
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(entry.why_not)


def test_nothing_of_what_has_side_effects_is_run(manager, monkeypatch, capsys):
    for function in (counts, prints, logs):
        manager.plan(calls_as_global(function, monkeypatch))
    assert (counter, log, capsys.readouterr().out) == (0, [], "")


def writes_into_q(q, k, cos, sin, unsqueeze_dim=1):
    rotated = right(q, k, cos, sin, unsqueeze_dim)
    return q.copy_(rotated[0]), rotated[1]


def test_what_writes_into_its_input_is_no_variant(manager, monkeypatch):
    (entry,) = manager.plan(calls_as_global(writes_into_q, monkeypatch)).report.entries
    assert entry.rejections[0][1].kind == "unlike"


class Static(nn.Module):
    def forward(self, q, k, cos, sin):
        return self.apply_rotary(q, k, cos, sin)

    @staticmethod
    def apply_rotary(q, k, cos, sin):
        return right(q, k, cos, sin)


def test_a_static_rotary_method_is_left_alone_with_the_reason(manager):
    (entry,) = manager.plan(Static()).report.entries
    assert "Static.apply_rotary is a staticmethod" in entry.why_not


class FromTheLibrary(nn.Module):
    """Stands in for a function in all models, as one object, like the wrapper of the kernels library."""


def wrapped(function):
    FromTheLibrary.forward = lambda self, *args, **kwargs: function(*args, **kwargs)
    return FromTheLibrary()


def test_a_module_object_in_the_place_of_the_function_is_fused_for_one_instance(manager, monkeypatch):
    shared = wrapped(right)
    module, other = calls_as_global(shared, monkeypatch), Calling()
    q, k, cos, sin = tensors()
    assert found(manager.apply_all(module).report) == {"rotary": "half"}
    assert "forward" not in vars(shared)
    assert "forward" not in vars(other)
    assert torch.equal(module(q, k, cos, sin)[0], right(q, k, cos, sin)[0])


def test_integers_go_to_the_original(manager, monkeypatch):
    module = calls_as_global(right, monkeypatch)
    manager.apply_all(module)
    whole = [t.detach().mul(4).round().long() for t in tensors()]
    assert all(torch.equal(a, b) for a, b in zip(module(*whole), right(*whole), strict=True))


@thorough  # tests/rope/test_numbers.py checks one of each kind
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_out_as_in_the_original(manager, value):
    for module in specimens.specimens():
        x = torch.randn(2, 5, 8)
        x[1, 3, 2] = value
        expected = module(x)
        with manager.apply_all(module, verify=False):
            torch.testing.assert_close(module(x), expected, rtol=0, atol=0, equal_nan=True)


def _zeros(q, k, cos, sin, *, variant):
    return q * 0, k * 0


def _turns_back(q, k, cos, sin, *, variant):
    return reference.rope(q, k, cos, -sin, variant=variant)


def _swaps(q, k, cos, sin, *, variant):
    return reference.rope(q, k, sin, cos, variant=variant)


def _reads_one_half(q, k, cos, sin, *, variant):
    half = cos.shape[-1] // 2
    cos, sin = (torch.cat((table[..., :half],) * 2, -1) for table in (cos, sin))
    return reference.rope(q, k, cos, sin, variant=variant)


def _cuts_gradient(q, k, cos, sin, *, variant):
    return reference.rope(q, k, cos.detach(), sin, variant=variant)


def _forgets_k(q, k, cos, sin, *, variant):
    return reference.rope(q, k, cos, sin, variant=variant)[0], k + 0 * cos.sum()


@pytest.mark.parametrize("wrong", [_zeros, _turns_back, _swaps, _reads_one_half, _cuts_gradient, _forgets_k])
def test_the_examples_expose_a_wrong_implementation(manager, monkeypatch, wrong):
    kernel = type("Wrong", (RoPEKernel,), {"kernel_id": "wrong_rope", "function": f"{__name__}:{wrong.__name__}"})
    manager = type(manager)(environ={"FUSEPLUG_KERNELS": "wrong_rope"})
    manager.register(kernel)
    (entry,) = manager.plan(calls_as_global(right, monkeypatch)).report.entries
    assert entry.rejections[0][1].kind == "failed", entry.why_not


def test_the_first_mix_is_how_the_module_stands_and_heads_are_of_its_size():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        (proposal,) = match(Site("module", halves.Half(head_dim=24).to(dtype), "cpu"))
        example = proposal.example(proposal.mixes[0], 1 << 14, torch.Generator().manual_seed(0))
        assert {tensor.dtype for tensor in example.args} == {dtype}
        assert example.args[0].shape[-1] == 24
        assert example.args[0].numel() >= 1 << 14


def test_a_function_is_understood_once_however_many_modules_call_it(monkeypatch):
    from fuseplug_rope.recognise import function_calls as forms

    calls, accepted = [], forms.accepted

    def counted(*args):
        calls.append(args)
        return accepted(*args)

    monkeypatch.setattr(forms, "accepted", counted)
    module = calls_as_global(functools.wraps(right)(lambda *args: right(*args)), monkeypatch)
    assert not isinstance(match(Site("module", module, "cpu")), Rejection | None)
    once = len(calls)
    assert once
    (proposal,) = match(Site("module", Calling(), "cpu"))
    assert proposal.target == Target("forward", "rotary")
    assert len(calls) == once


class Growing(without_functions.Halves):
    """Makes larger tables when it needs them."""

    def forward(self, x):
        if x.shape[1] > len(self.cos):
            self.grow(x.shape[1])
        return super().forward(x)

    def grow(self, length):
        self.cos = self.sin = torch.zeros(length, 8)


class HandingOut(without_functions.Halves):
    def forward(self, x):
        return self.cos[: x.shape[1]], self.sin[: x.shape[1]]


class Doubling(without_functions.Halves):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_module_that_makes_tables_as_it_rotates_is_left_alone():
    said = match(Site("rotary", Growing(), "cpu"))
    assert isinstance(said, Rejection)
    assert "self.cos = self.sin" in said.reason


def test_a_module_that_hands_out_its_tables_is_no_rotation():
    assert match(Site("rotary", HandingOut(), "cpu")) is None


def test_a_module_that_does_more_than_rotate_is_no_variant(manager):
    (entry,) = manager.plan(Doubling(), verify=False).report.entries
    assert not entry.fused
    assert "computes none of the known variants" in entry.rejections[0][1].reason


@pytest.mark.parametrize("positions", [None, torch.tensor([[3, 1, 0, 7, 2], [9, 9, 4, 5, 6]])])
def test_a_rotary_module_is_called_with_positions_or_without_and_reads_its_tables_each_time(manager, positions):
    module, x = without_functions.Pairs(), torch.randn(2, 5, 3, 16)
    with manager.apply_all(module, verify=False) as applied:
        assert len(applied.report.fused) == 1
        during = module(x, input_pos=positions)
        module.cache *= 2
        doubled = module(x, input_pos=positions)
    assert torch.equal(doubled, module(x, input_pos=positions))
    assert not torch.equal(during, doubled)


def test_what_was_not_verified_of_a_rotary_module_is_the_originals(manager):
    module, x = without_functions.Halves(), torch.randn(5, 3, 16)
    with manager.apply_all(module, verify=False):
        during = module(x)
    assert torch.equal(during, module(x))


def test_a_method_of_a_module_that_does_not_say_how_wide_its_heads_are_is_left_alone():
    module = without_functions.PartialMethod()
    del module.head_dim
    said = match(Site("attention", module, "cpu"))
    assert isinstance(said, Rejection)
    assert "does not say how wide a head is" in said.reason


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_a_scripted_rotary_function_is_left_alone_with_a_reason(monkeypatch):
    module = calls_as_global(torch.jit.script(tables_of_planes.pairs_table_rotary), monkeypatch)
    said = match(Site("attention", module, "cpu"))
    assert isinstance(said, Rejection)
    assert "TorchScript" in said.reason


@pytest.mark.parametrize(
    ("specimen", "dtype", "likely"),
    [
        (halves.Half, torch.float32, {torch.bfloat16}),
        (halves.Half, torch.bfloat16, set()),  # its q would come out in float32, beside a v in bfloat16
        (halves.Promoting, torch.float32, {torch.bfloat16}),
        (halves.Promoting, torch.bfloat16, {torch.bfloat16}),
    ],
)
def test_tables_in_float32_are_likely_where_the_results_can_be_used(specimen, dtype, likely):
    (proposal,) = match(Site("module", specimen().to(dtype), "cpu"))
    assert {mix.x for mix in proposal.likely if mix.table is torch.float32} == likely


def test_a_small_call_is_compared_once_however_many_ways_of_calling_were_tried(manager, monkeypatch):
    monkeypatch.delenv("FUSEPLUG_EVERY_SIZE")
    monkeypatch.setattr(RoPEKernel, "gains_from", lambda *_: 1_000_000)
    calls_as_global(right, monkeypatch)
    module = CallingEitherWay()
    applied = manager.apply_all(module)
    assert len(replacement_of(applied.patches[0].function).guards) > 1
    monkeypatch.setattr(Placing, "__call__", lambda *_: pytest.fail("another way of calling was looked for"))
    for fused, want in zip(module(*tensors()), right(*tensors()), strict=True):
        assert torch.equal(fused, want)
    assert [(calls.fused, calls.original) for calls in applied.calls()] == [(0, 1)]


def test_a_kernel_computes_only_the_calls_that_the_forward_makes_because_it_was_run_in_no_others(manager, monkeypatch):
    calls_as_global(right, monkeypatch)
    q, k, cos, sin = tensors()
    counts = []
    for module, options in ((CallingEitherWay(), {"sequence_first": True}), (Calling(), {"unsqueeze_dim": 2})):
        applied = manager.apply_all(module)
        module(q.transpose(1, 2), k.transpose(1, 2), cos, sin, **options)
        counts += [(calls.fused, calls.original) for calls in applied.calls()]
    assert counts == [(1, 0), (0, 1)]


def test_tables_with_more_rows_than_there_are_patches_raise_as_in_the_original(manager, monkeypatch):
    module = calls_as_global(signatures.patches_rotary, monkeypatch)
    q, k, cos, sin = tensors()
    applied = manager.apply_all(module)
    module(q, k, cos[0, 1:], sin[0, 1:])
    assert [(calls.fused, calls.original) for calls in applied.calls()] == [(1, 0)]
    for rotate in (module, signatures.patches_rotary):
        with pytest.raises(RuntimeError, match="split"):
            rotate(q[..., 1:, :], k[..., 1:, :], cos[0], sin[0])
