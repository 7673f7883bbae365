"""Functions of wrong kernels: each has one fault."""

import itertools
import os
import threading
import time

import torch
from torch.nn import functional

from . import reference, right
from .right import norm as right_norm

# --- values


def zeros(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * 0


def without_offset(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, 0.0)


def wrong_dtype(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset).float()


def narrow(x, weight, eps, offset=0.0):
    """Computes in the dtype of *x*, although the formula has float32 inside."""
    unit = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return (unit * (weight + offset)).to(x.dtype)


def key_unturned(q, k, cos, sin):
    return right.rotary(q, k, cos, sin)[0], k * 1


# --- gradients


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def wrong_gradient(x, weight, eps, offset=0.0):
    return right_norm(_Scaled.apply(x), weight, eps, offset)


def wrong_weight_gradient(x, weight, eps, offset=0.0):
    return right_norm(x, _Scaled.apply(weight), eps, offset)


def without_gradient(x, weight, eps, offset=0.0):
    with torch.no_grad():
        return right_norm(x, weight, eps, offset)


class _Norm(torch.autograd.Function):
    """A norm with its own backward, in which each subclass has a fault."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        ctx.save_for_backward(x, weight)
        ctx.rest = eps, offset
        return right_norm(x, weight, eps, offset)

    @classmethod
    def backward(cls, ctx, gradient):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            made = right_norm(x, weight, *ctx.rest)
        return (*cls.found(ctx, torch.autograd.grad(made, (x, weight), cls.above(gradient))), None, None)

    @staticmethod
    def above(gradient):
        return gradient

    @staticmethod
    def found(ctx, gradients):
        return gradients


class _AssumesContiguousGradient(_Norm):
    @staticmethod
    def above(gradient):
        strides = torch.empty(gradient.shape).stride()
        return gradient.as_strided(gradient.shape, strides) if 0 not in gradient.stride() else gradient * 0


class _AllOrNothing(_Norm):
    @staticmethod
    def found(ctx, gradients):
        return gradients if ctx.needs_input_grad[1] else (gradients[0] * 2, None)


def contiguous_gradient_only(x, weight, eps, offset=0.0):
    return _AssumesContiguousGradient.apply(x, weight, eps, offset)


class _SavesWhatItComputed(torch.autograd.Function):
    """Its backward is right, but takes the reciprocal root for a constant."""

    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, root)
        ctx.offset = offset
        return right_norm(x, weight, eps, offset)

    @staticmethod
    def backward(ctx, gradient):
        x, weight, root = ctx.saved_tensors
        unit = x.float() * root
        scaled = gradient.float() * (ctx.offset + weight.float())
        rows = tuple(range(x.dim() - 1))
        of_x = root * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
        return of_x.to(x.dtype), (gradient.float() * unit).sum(rows).to(weight.dtype), None, None


def wrong_if_differentiated_twice(x, weight, eps, offset=0.0):
    return _SavesWhatItComputed.apply(x, weight, eps, offset)


def wrong_when_weight_is_frozen(x, weight, eps, offset=0.0):
    return _AllOrNothing.apply(x, weight, eps, offset)


# --- only at edges


def raises_when_empty(x, weight, eps, offset=0.0):
    if not x.numel():
        raise RuntimeError("grid of size 0")
    return right_norm(x, weight, eps, offset)


def wrong_at_odd(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    if x.shape[-2] % 2 and x.shape[-2] > 1:
        made = torch.cat([made[..., :-1, :], made[..., -1:, :] * 0], -2)
    return made


def wrong_at_one(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * (0 if x.shape[-2] == 1 else 1)


def wrong_in_one_row(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * (0 if x.numel() == x.shape[-1] else 1)


def contiguous_only(x, weight, eps, offset=0.0):
    x = x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())
    return right_norm(x, weight, eps, offset)


def forgets_storage_offset(x, weight, eps, offset=0.0):
    if x.is_contiguous():
        x = x.as_strided(x.shape, x.stride(), 0)
    return right_norm(x, weight, eps, offset)


def wrong_when_large(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * (0 if x.numel() > 1000 and x.dtype is torch.float32 else 1)


def wrong_in_half(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * (2 if x.dtype is torch.float16 else 1)


def leans_in_half(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * (1.004 if x.dtype is torch.bfloat16 else 1)


def shifted_in_half(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) + (0.01 if x.dtype is torch.bfloat16 else 0)


class _Leaning(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1.004 if gradient.dtype is torch.bfloat16 else 1)


def gradient_leans_in_half(x, weight, eps, offset=0.0):
    return right_norm(_Leaning.apply(x), weight, eps, offset)


def wrong_without_gradients(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return made if torch.is_grad_enabled() else made * 1.5


def always_records(x, weight, eps, offset=0.0):
    with torch.inference_mode(False), torch.enable_grad():
        return right_norm(x, weight, eps, offset)


def other_bits_without_gradients(x, weight, eps, offset=0.0):
    return (right_norm if torch.is_grad_enabled() else reference.norm)(x, weight, eps, offset)


def hides_nan(x, weight, eps, offset=0.0):
    return right_norm(x.nan_to_num(0.0), weight, eps, offset)


def spreads_nan(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) + 0 * x.detach().sum().to(x.dtype)


def divides_by_zero(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return torch.where((x == 0).all(-1, keepdim=True), torch.full_like(made, float("nan")), made)


# --- memory


def writes_input(x, weight, eps, offset=0.0):
    made = right_norm(x.clone(), weight, eps, offset)
    x.data.mul_(2)
    return made


def view_of_its_input(x):
    return x[..., : x.shape[-1] // 2]


_seen = {}


def stale(x, weight, eps, offset=0.0):
    """Computes once for each shape, like a captured graph to which nobody copies new inputs."""
    key = (x.shape, x.dtype, weight.dtype, offset)
    if x.numel() < 1000:
        return right_norm(x, weight, eps, offset)
    return _seen.setdefault(key, right_norm(x, weight, eps, offset))


class _IntoBuffer(_Norm):
    @staticmethod
    def forward(ctx, x, weight, eps, offset):
        made = _Norm.forward(ctx, x, weight, eps, offset)
        buffer = _seen.setdefault(("buffer", made.shape, made.dtype, offset), torch.empty_like(made))
        return buffer.copy_(made).view_as(made)


def reused_buffer(x, weight, eps, offset=0.0):
    return _IntoBuffer.apply(x, weight, eps, offset)


def reused_buffer_without_gradients(x, weight, eps, offset=0.0):
    if torch.is_grad_enabled():
        return right_norm(x, weight, eps, offset)
    return _IntoBuffer.apply(x, weight, eps, offset)


_kept = []


def keeps_references(x, weight, eps, offset=0.0):
    _kept[:] = [*_kept[-8:], x.detach()]
    return right_norm(x, weight, eps, offset)


class _ReadsUnwritten(_Norm):
    @staticmethod
    def found(ctx, gradients):
        # Accumulates into unwritten memory. Reused memory may hold anything, so only NaN shows here.
        fresh = torch.empty(1 << 24)[: len(gradients[1])]
        return gradients[0], gradients[1] + torch.where(fresh.isnan(), fresh, 0).to(gradients[1].dtype)


def reads_unwritten_memory(x, weight, eps, offset=0.0):
    return _ReadsUnwritten.apply(x, weight, eps, offset)


# --- repetition, threads, process

_calls = itertools.count()


def not_the_same_twice(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return made * (1 + next(_calls) % 3 * torch.finfo(torch.float32).eps)


def the_same_if_asked(x, weight, eps, offset=0.0):
    """Behaves like a kernel that adds with atomic operations."""
    asked = torch.are_deterministic_algorithms_enabled()
    return (right_norm if asked else not_the_same_twice)(x, weight, eps, offset)


_workspace = {}


def shared_workspace(x, weight, eps, offset=0.0):
    """Stores its input in a place that all threads share."""
    _workspace["x"] = x
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.02)
    return right_norm(_workspace["x"], weight, eps, offset)


def first_thread_only(x, weight, eps, offset=0.0):
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("no context in this thread")
    return right_norm(x, weight, eps, offset)


def draws_random_numbers(x, weight, eps, offset=0.0):
    torch.rand(1)
    return right_norm(x, weight, eps, offset)


def changes_the_default_dtype(x, weight, eps, offset=0.0):
    torch.set_default_dtype(torch.float64)
    return right_norm(x, weight, eps, offset)


def writes_environment(x, weight, eps, offset=0.0):
    os.environ.setdefault("ZOO_WORKSPACE", "1")
    return right_norm(x, weight, eps, offset)


def patches_torch(x, weight, eps, offset=0.0):
    if functional.relu6.__module__ != __name__:
        functional.relu6 = without_offset
    return right_norm(x, weight, eps, offset)


def patches_the_class(x, weight, eps, offset=0.0):
    from .specimens import CastLastNorm

    if "extra_repr" not in vars(CastLastNorm):
        CastLastNorm.extra_repr = lambda self: "patched"
    return right_norm(x, weight, eps, offset)


def patches_the_function(q, k, cos, sin):
    from . import specimens

    specimens.rotate_half = right.turned
    return right.rotary(q, k, cos, sin)


# --- compilers, checkpoints and autocast


def breaks_the_graph(x, weight, eps, offset=0.0):
    torch._dynamo.graph_break()
    return right_norm(x, weight, eps, offset)


def wrong_when_compiled(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return made * 2 if torch.compiler.is_compiling() else made


def wrong_under_autocast(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return made.bfloat16() if torch.is_autocast_enabled("cpu") else made


def wrong_when_recomputed(x, weight, eps, offset=0.0):
    """Takes the recomputed forward of a step for another step's."""
    return right_norm(x * (2 if torch._C._current_graph_task_id() >= 0 else 1), weight, eps, offset)


class _View(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.view(y.shape)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def gives_a_view(x, weight, eps, offset=0.0):
    """Returns a view that nobody may write into, as if it had computed rows in another shape."""
    return _View.apply(right_norm(x, weight, eps, offset))


def packs_weight_once(x, weight, eps, offset=0.0):
    """Keeps the weight that it packed for inference, by shape."""
    if not weight.requires_grad:
        weight = _seen.setdefault(("packed", weight.shape, weight.dtype, offset), weight)
    return right_norm(x, weight, eps, offset)


def leaves_it(x, weight, eps, offset=0.0):
    return NotImplemented


def exits(x, weight, eps, offset=0.0):
    raise SystemExit(0)


# --- results, and their places


def wrong_far_beyond(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * (0 if x.numel() > 1 << 18 else 1)


def wrong_when_large_and_odd(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset) * (0 if x.numel() > 1 << 14 and x.shape[-2] % 2 else 1)


class Marked(torch.Tensor):
    pass


def gives_a_subclass(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, offset).as_subclass(Marked)


def gives_a_subclass_without_gradients(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return made if torch.is_grad_enabled() else made.as_subclass(Marked)


def gives_what_cannot_be_viewed(x, weight, eps, offset=0.0):
    found = right_norm(x, weight, eps, offset)
    return found.transpose(0, 1).contiguous().transpose(0, 1) if found.dim() > 1 else found


def gives_a_list(q, k, cos, sin):
    return list(right.rotary(q, k, cos, sin))


def index_on_the_default_device(x):
    half = torch.arange(x.shape[-1] // 2)
    wide = x.float()
    gate, up = wide[..., half], wide[..., half + len(half)]
    return (functional.silu(gate) * up).to(x.dtype)


def made_on_the_default_device(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return made + torch.zeros(made.shape[-1:], dtype=made.dtype)


def coarser_under_autocast(x, weight, eps, offset=0.0):
    made = right_norm(x, weight, eps, offset)
    return made.bfloat16().to(made.dtype) if torch.is_autocast_enabled("cpu") else made


def flushes_denormals(x, weight, eps, offset=0.0):
    torch.set_flush_denormal(True)
    return right_norm(x, weight, eps, offset)


def raises_the_recompile_limit(x, weight, eps, offset=0.0):
    torch._dynamo.config.recompile_limit = 99
    return right_norm(x, weight, eps, offset)


# --- lazy results


def wrong_loss(x, weight, labels):
    return right.label_loss(x, weight, labels) * 1.01


def wrong_loss_gradient(x, weight, labels):
    return right.label_loss(x, _Scaled.apply(weight), labels)


def wrong_loss_in_half(x, weight, labels):
    return right.label_loss(x, weight, labels) * (2 if x.dtype is torch.float16 else 1)


def shared_workspace_of_loss(x, weight, labels):
    _workspace["x"] = x
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.02)
    return right.label_loss(_workspace["x"], weight, labels)


def keeps_references_of_loss(x, weight, labels):
    _kept[:] = [*_kept[-8:], x.detach()]
    return right.label_loss(x, weight, labels)


def hides_nan_from_loss(x, weight, labels):
    return right.label_loss(x.nan_to_num(0.0), weight, labels)


# --- one of two targets


def without_offset_beside(x, weight, eps, offset=0.0):
    return right_norm(x, weight, eps, 0.0)
