"""Other changes that people make to a fused model: it then computes the same as an unfused model with that change."""

import copy

import pytest
import torch
from support.models import Attention, Norm, Toy, inputs, tiny_llama, tokens
from support.thorough import first_quick
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

pytestmark = pytest.mark.usefixtures("checked_once")


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


class OtherNorm(Norm):
    """Another class with another formula."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * 0.5


def parametrized_norm(model):
    parametrize.register_parametrization(model.norm, "weight", Halved())


def parametrized_and_back(model):
    parametrized_norm(model)
    parametrize.remove_parametrizations(model.norm, "weight")


def parametrized_projection(model):
    parametrize.register_parametrization(model.layers[0].mlp.gate, "weight", Halved())


def pruned(model):
    for module in (model.norm, model.layers[0].mlp.gate):
        prune.l1_unstructured(module, "weight", amount=0.5)


def weight_norm(model):
    parametrizations.weight_norm(model.layers[0].attention.q)
    parametrizations.weight_norm(model.layers[0].mlp.down)


def state():
    other = Toy()
    return {name: torch.linspace(-1, 1, value.numel()).view_as(value) for name, value in other.state_dict().items()}


def assigned(model):
    model.load_state_dict(state(), assign=True)


def another_class(model):
    model.norm.__class__ = OtherNorm


class OtherAttention(Attention):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 0.5


def another_class_of_attention(model):
    model.layers[0].attention.__class__ = OtherAttention


def another_class_with_the_same_forward(model):
    model.norm.__class__ = type("Renamed", (Norm,), {})


def swapped_tensors(model):
    torch.utils.swap_tensors(model.norm.weight, nn.Parameter(torch.linspace(2, 3, 16)))


def hooked_below(model):
    model.norm.register_forward_hook(lambda module, args, output: output * 2)
    model.layers[0].attention.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def sliced(model):
    model.layers = model.layers[1:]


def layers_in_another_order(model):
    model.layers = nn.ModuleList([model.layers[1], model.layers[0], model.layers[1]])


def tied(model):
    model.layers[0].norm1.weight = model.norm.weight
    model.layers[1].mlp.gate.weight = model.layers[0].mlp.gate.weight


def norm_replaced_by_a_fused_one(model):
    model.norm = model.layers[0].norm1


def frozen(model):
    model.requires_grad_(False)
    model.norm.weight.requires_grad_()


def weight_as_a_plain_tensor(model):
    weight = model.norm.weight.detach() * 2
    del model.norm.weight
    model.norm.weight = weight


def bfloat16(model):
    model.to(torch.bfloat16)
    model.float()


def one_child_in_half_precision(model):
    model.norm.bfloat16()


def meta_and_back(model):
    state = copy.deepcopy(model.state_dict())
    model.to("meta").to_empty(device="cpu")
    model.load_state_dict(state)


DONE = [
    parametrized_norm,
    parametrized_and_back,
    parametrized_projection,
    pruned,
    weight_norm,
    assigned,
    another_class,
    another_class_of_attention,
    another_class_with_the_same_forward,
    swapped_tensors,
    hooked_below,
    sliced,
    layers_in_another_order,
    tied,
    norm_replaced_by_a_fused_one,
    frozen,
    weight_as_a_plain_tensor,
    bfloat16,
    one_child_in_half_precision,
    meta_and_back,
]


def step(model, x=None):
    """The output, and the gradients of the input and of every parameter."""
    x = inputs().requires_grad_() if x is None else x
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(model):
    """The paths of the modules that hold a method other than their class's own."""
    return [path for path, module in model.named_modules() for name in METHODS if not is_own(module, name)]


METHODS = ("forward", "_replicate_for_data_parallel")


def is_own(module, name):
    held = vars(module).get(name)
    return held is None or (held.__self__ is module and held.__func__ is getattr(type(module), name))


@pytest.mark.parametrize("do", DONE, ids=[each.__name__ for each in DONE])
def test_it_is_then_as_the_unfused_model_and_undone_exactly(fusing, do):
    plain, model = Toy(), Toy()
    do(plain)
    want = step(plain)
    applied = fusing.apply_all(model)
    assert len(applied.report.fused) == 7
    do(model)
    torch.testing.assert_close(step(model), want, rtol=1e-3, atol=1e-4)
    assert fusing.applied_to(model) is not None
    assert fusing.apply_all(model).lost == []
    torch.testing.assert_close(step(model), want, rtol=1e-3, atol=1e-4)
    applied.undo()
    fusing.undo(model)
    assert ours(model) == ours(plain)
    found = step(model)
    torch.testing.assert_close(found, want, rtol=0, atol=0)


@pytest.mark.parametrize("do", first_quick(DONE, 5), ids=[each.__name__ for each in DONE])
def test_fused_after_it_was_done_it_is_as_the_unfused_model(fusing, do):
    plain, model = Toy(), Toy()
    do(plain), do(model)
    want, before = step(plain), ours(model)
    applied = fusing.apply_all(model)
    torch.testing.assert_close(step(model), want, rtol=1e-3, atol=1e-4)
    applied.undo()
    assert ours(model) == before
    torch.testing.assert_close(step(model), want, rtol=0, atol=0)


def shallow(model):
    return copy.copy(model)


def quantized(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


COPIES = [shallow, quantized]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("copied", COPIES, ids=[each.__name__ for each in COPIES])
def test_a_copy_of_a_fused_model_computes_what_one_of_the_unfused_does(fusing, copied):
    plain, model = Toy().eval(), Toy().eval()
    want, of_plain = plain(inputs()), copied(plain)(inputs())
    applied = fusing.apply_all(model)
    duplicate = copied(model)
    torch.testing.assert_close(duplicate(inputs()), of_plain, rtol=1e-3, atol=1e-4)
    for each in (duplicate, model):
        fusing.undo(each)
        assert ours(each) == []
    applied.undo()
    assert torch.equal(model(inputs()), want)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("end", ["merge_and_unload", "unload", "merge_adapter", "disable_adapter_layers"])
def test_adapters_added_to_a_fused_model_and_merged_or_taken_off(fusing, end):
    peft = pytest.importorskip("peft")

    def adapted(model):
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj", "gate_proj", "down_proj"], modules_to_save=["norm"], init_lora_weights=False
        )
        return peft.get_peft_model(model, config).eval()

    def ended(model):
        return getattr(model, end)() or model

    def logits(model):
        return model(tokens()).logits

    plain = adapted(tiny_llama())
    want = logits(plain)
    bare = tiny_llama()
    applied = fusing.apply_all(bare)
    model = adapted(bare)
    torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=1e-4)
    plain, model = ended(plain), ended(model)
    want = logits(plain)
    torch.testing.assert_close(logits(model), want, rtol=1e-3, atol=1e-4)
    applied.undo()
    fusing.undo(model)
    assert ours(model) == ours(plain)
    assert torch.equal(logits(model), want)
