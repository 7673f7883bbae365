"""Right kernels, whose formulas differ from the models' own, and other kernels that are made from them."""

import itertools
from collections import Counter
from dataclasses import dataclass

import torch

from fuseplug import Adapter, BaseKernel, Example, Proposal, Rejection, Target

ran = Counter()
"""How often each function below was called: the proof that a kernel ran."""

_serial = itertools.count()


def variant_of(base, kernel_id=None, **declared):
    """A kernel like *base*, except for what *declared* overrides."""
    kernel_id = kernel_id or f"{base.kernel_id}_{next(_serial)}"
    return type(base)(kernel_id, (base,), {"kernel_id": kernel_id, "__module__": __name__, **declared})


# --- norms


def norm_reference(x, weight, eps, offset=None, cast_last=False):
    wide = torch.promote_types(x.dtype, torch.float32)
    raised = x.to(wide)
    normal = raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + eps)
    if offset is not None:
        return (normal * (offset + weight.to(wide))).to(x.dtype)
    return (weight * normal).to(x.dtype) if cast_last else weight * normal.to(x.dtype)


def quiet_norm(x, weight, eps, offset=None, cast_last=False):
    """Right, and without a counter, which torch.compile would guard on."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide / torch.sqrt(wide.square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    if offset is not None:
        return (normal + normal * weight if offset == 1 else normal * (weight + offset)).to(x.dtype)
    return (weight * normal).to(x.dtype) if cast_last else weight * normal.to(x.dtype)


def fused_norm(x, weight, eps, offset=None, cast_last=False):
    ran["norm"] += 1
    return quiet_norm(x, weight, eps, offset, cast_last)


def other_norm(x, weight, eps, offset=None, cast_last=False):
    ran["other"] += 1
    return quiet_norm(x, weight, eps, offset, cast_last)


def quiet_other_norm(x, weight, eps, offset=None, cast_last=False):
    """Right by a third formula, so that its bits tell it from `quiet_norm`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * (wide.square().mean(-1, keepdim=True) + eps).pow(-0.5)
    if offset is not None:
        return (normal * (offset + weight)).to(x.dtype)
    return (weight * normal).to(x.dtype) if cast_last else weight * normal.to(x.dtype)


@dataclass(frozen=True)
class NormAdapter(Adapter):
    variant: str
    eps: str
    offset: float | None = None
    cast_last: bool = False

    def bind(self, compute):
        eps, offset, cast_last = self.eps, self.offset, self.cast_last

        def norm(module, x):
            return compute(x, module.weight, getattr(module, eps), offset, cast_last)

        return norm


class NormKernel(BaseKernel):
    kernel_id = "toy_norm"
    op = "toynorm"
    function = "support.kernels:fused_norm"
    reference = "support.kernels:norm_reference"
    check_sizes = (512,)
    mixes = tuple((x, w) for x in (torch.float32, torch.bfloat16, torch.float16) for w in (x, torch.float32))

    def match(self, site):
        weight = getattr(site.module, "weight", None)
        eps = next((name for name in ("eps", "variance_epsilon") if hasattr(site.module, name)), None)
        if eps is None or weight is None or weight.dim() != 1:
            return None
        if site.module.eps_is_secret if hasattr(site.module, "eps_is_secret") else False:
            return Rejection("its eps is a secret")
        return [self.proposal(site, weight.shape[0], eps, weight.dtype)]

    def proposal(self, site, hidden, eps, dtype):
        adapters = (
            NormAdapter("llama", eps),
            NormAdapter("gemma", eps, offset=1.0),
            NormAdapter("cast-last", eps, cast_last=True),
        )

        def example(mix, size, generator):
            x_dtype, weight_dtype = mix
            rows = max(4, size // hidden)
            # Magnitudes near the root of eps, around 1 and large, to reveal a wrong eps and overflows.
            scale = torch.tensor([1.0, 1e-3, 300.0, 0.1]).repeat(rows // 4 + 1)[:rows, None]
            x = torch.randn(rows, hidden, generator=generator) * scale
            weight = torch.randn(hidden, generator=generator)
            return Example([x.to(x_dtype)], {"weight": weight.to(weight_dtype)})

        mixes = dict.fromkeys([(dtype, dtype), *self.mixes])
        likely = [(torch.bfloat16, dtype)] if dtype is torch.float32 else []
        return Proposal(Target(), adapters, example, tuple(mixes), likely=likely)


# --- functions that a method looks up as globals


def rotary_reference(q, k, cos, sin):
    def rotate(x):
        half = x.shape[-1] // 2
        return torch.cat((-x[..., half:], x[..., :half]), dim=-1)

    return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin


def quiet_rotary(q, k, cos, sin):
    def turn(x):
        return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin * sign)

    sign = torch.ones(q.shape[-1], dtype=q.dtype)
    sign[: q.shape[-1] // 2] = -1
    return turn(q), turn(k)


def fused_rotary(q, k, cos, sin):
    ran["rotary"] += 1
    return quiet_rotary(q, k, cos, sin)


def gate_reference(x, gate):
    return x * torch.sigmoid(gate)


def fused_gate(x, gate):
    ran["gate"] += 1
    return x / (1 + torch.exp(-gate))


@dataclass(frozen=True)
class Plain(Adapter):
    """For functions whose kernel has the same signature."""

    variant: str = "plain"

    def bind(self, compute):
        def call(*args):
            return compute(*args)

        return call


class FunctionKernel(BaseKernel):
    names: tuple[str, ...]
    inputs: int
    check_sizes = (512,)

    def match(self, site):
        from fuseplug_verify import called_functions

        forward = type(site.module).forward
        return [self.proposal(name) for name in self.names if name in called_functions(forward)]

    def proposal(self, name):
        def example(dtype, size, generator):
            shape = (2, max(2, size // 32), 16)
            return Example([torch.randn(shape, generator=generator).to(dtype) for _ in range(self.inputs)])

        return Proposal(Target("forward", name), (Plain(),), example, (torch.float32, torch.bfloat16), roundings=16.0)


class RotaryKernel(FunctionKernel):
    kernel_id = "toy_rotary"
    op = "toyrotary"
    function = "support.kernels:fused_rotary"
    reference = "support.kernels:rotary_reference"
    names = ("apply_rotary", "apply_rotary_pos_emb")
    inputs = 4

    def proposal(self, name):
        if name == "apply_rotary":
            return super().proposal(name)

        def example(dtype, size, generator):
            shape = (2, 2, max(2, size // 32), 8)
            q, k = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
            cos, sin = (torch.randn(2, shape[2], 8, generator=generator).to(dtype) for _ in range(2))
            return Example([q, k, cos, sin])

        return Proposal(
            Target("forward", name), (Unsqueezed(),), example, (torch.float32, torch.bfloat16), roundings=16.0
        )


@dataclass(frozen=True)
class Unsqueezed(Adapter):
    variant: str = "half"

    def bind(self, compute):
        def call(q, k, cos, sin):
            return compute(q, k, cos.unsqueeze(1), sin.unsqueeze(1))

        return call


class GateKernel(FunctionKernel):
    kernel_id = "toy_gate"
    op = "toygate"
    function = "support.kernels:fused_gate"
    reference = "support.kernels:gate_reference"
    names = ("apply_gate",)
    inputs = 2


# --- a whole attention, which calls neither function any more


def attention_reference(x, q, k):
    from .models import apply_gate, apply_rotary

    length, size = x.shape[-2:]
    angle = torch.arange(length, dtype=torch.float32)[:, None] * torch.linspace(1, 0.1, size)
    cos, sin = (t.to(x) for t in (angle.cos(), angle.sin()))
    q, k = apply_rotary(torch.nn.functional.linear(x, q), torch.nn.functional.linear(x, k), cos, sin)
    return apply_gate(torch.softmax(q @ k.transpose(-1, -2), -1) @ x, x)


def fused_attention(x, q, k):
    ran["attention"] += 1
    return attention_reference(x, q, k)


@dataclass(frozen=True)
class AttentionAdapter(Adapter):
    variant: str = "toy"

    def bind(self, compute):
        def attention(module, x):
            return compute(x, module.q.weight, module.k.weight)

        return attention


class AttentionKernel(BaseKernel):
    kernel_id = "toy_attention"
    op = "toyattention"
    function = "support.kernels:fused_attention"
    reference = "support.kernels:attention_reference"
    check_sizes = (512,)

    def match(self, site):
        if not (hasattr(site.module, "q") and hasattr(site.module, "k")):
            return None

        def example(dtype, size, generator):
            def linear():
                made = torch.nn.Linear(16, 16, bias=False)
                made.weight.data = torch.randn(16, 16, generator=generator).div(4).to(dtype)
                return made

            x = torch.randn(1, max(2, size // 16), 16, generator=generator).to(dtype)
            return Example([x], children={"q": linear(), "k": linear()})

        return [Proposal(Target(), (AttentionAdapter(),), example, (torch.float32,), roundings=64.0)]


# --- a parent that no longer calls its children


def experts_reference(x, weights, epsilons):
    wide = torch.promote_types(x.dtype, torch.float32)

    def norm(weight, eps):
        raised = x.to(wide)
        return weight * (raised * torch.rsqrt(raised.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    return sum(map(norm, weights, epsilons))


def fused_experts(x, weights, epsilons):
    ran["experts"] += 1
    return experts_reference(x, weights, epsilons)


@dataclass(frozen=True)
class ExpertsAdapter(Adapter):
    variant: str = "toy"
    reads: tuple[str, ...] = ("experts.*.weight", "experts.*.eps")

    def bind(self, compute):
        def experts(module, x):
            return compute(x, [e.weight for e in module.experts], [e.eps for e in module.experts])

        return experts


class ExpertsKernel(BaseKernel):
    kernel_id = "toy_experts"
    op = "toyexperts"
    function = "support.kernels:fused_experts"
    reference = "support.kernels:experts_reference"
    check_sizes = (512,)
    covers: tuple[str, ...] = ("experts.0", "experts.1")

    def match(self, site):
        if not hasattr(site.module, "experts"):
            return None

        def example(dtype, size, generator):
            children = torch.nn.ModuleList([type(site.module.experts[0])(16) for _ in range(2)])
            for child, eps in zip(children, (1e-6, 1e-5), strict=True):
                child.eps = eps
                child.weight.data = torch.randn(16, generator=generator)
            x = torch.randn(max(4, size // 16), 16, generator=generator)
            return Example([x.to(dtype)], children={"experts": children})

        return [Proposal(Target(), (ExpertsAdapter(),), example, (torch.float32,), covers=self.covers)]
