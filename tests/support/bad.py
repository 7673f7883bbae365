"""Kernels that are wrong in other ways than those of tests/verify/test_verifying.py."""

import torch

from .kernels import fused_norm, norm_reference, quiet_norm


def nothing(*args, **kwargs):
    return torch.zeros_like(args[0])


def zeros(x, weight, eps, offset=None, cast_last=False):
    return torch.zeros_like(x) * weight


def without_offset(x, weight, eps, offset=None, cast_last=False):
    return quiet_norm(x, weight, eps, None, cast_last)


class WrongGradient(torch.autograd.Function):
    """The same values, and gradients that are off by a factor."""

    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def wrong_gradient(x, weight, eps, offset=None, cast_last=False):
    return quiet_norm(WrongGradient.apply(x, 1.01), weight, eps, offset, cast_last)


def wrong_weight_gradient(x, weight, eps, offset=None, cast_last=False):
    return quiet_norm(x, WrongGradient.apply(weight, 1.01), eps, offset, cast_last)


def detached_weight(x, weight, eps, offset=None, cast_last=False):
    return quiet_norm(x, weight.detach(), eps, offset, cast_last)


def writes_weight(x, weight, eps, offset=None, cast_last=False):
    result = quiet_norm(x, weight.clone(), eps, offset, cast_last)
    weight.data.mul_(2)
    return result


def too_many(x, weight, eps, offset=None, cast_last=False):
    return quiet_norm(x, weight, eps, offset, cast_last), x


def not_a_tensor(x, weight, eps, offset=None, cast_last=False):
    return "a result"


def overflows(x, weight, eps, offset=None, cast_last=False):
    result = quiet_norm(x, weight, eps, offset, cast_last)
    return torch.where(x.abs() > 100, result * float("nan"), result)


def raises(x, weight, eps, offset=None, cast_last=False):
    raise RuntimeError("no such instruction")


def raises_when_large(x, weight, eps, offset=None, cast_last=False):
    if x.numel() > 1024:
        raise RuntimeError("grid too large")
    return fused_norm(x, weight, eps, offset, cast_last)


def laid_out_otherwise_without_gradients(x, weight, eps, offset=None, cast_last=False):
    result = quiet_norm(x, weight, eps, offset, cast_last)
    return result if torch.is_grad_enabled() else result.mT.contiguous().mT


def wrong_when_large(x, weight, eps, offset=None, cast_last=False):
    """Wrong beyond the sizes that the kernel names."""
    result = quiet_norm(x, weight, eps, offset, cast_last)
    return torch.cat([result[:128], result[128:] * 0]) if len(result) > 128 else result


_seen = {}


def stale(x, weight, eps, offset=None, cast_last=False):
    """Computes once per shape, like a captured graph whose inputs nobody copies."""
    return _seen.setdefault(("stale", x.shape, x.dtype), quiet_norm(x, weight, eps, offset, cast_last))


def stale_weight(x, weight, eps, offset=None, cast_last=False):
    """Packs the weight once."""
    return quiet_norm(x, _seen.setdefault(("weight", weight.shape, weight.dtype), weight), eps, offset, cast_last)


class _IntoBuffer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, offset, cast_last):
        ctx.save_for_backward(x, weight)
        ctx.rest = (eps, offset, cast_last)
        result = quiet_norm(x, weight, eps, offset, cast_last)
        buffer = _seen.setdefault(("buffer", result.shape, result.dtype), torch.empty_like(result))
        return buffer.copy_(result).view_as(result)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            result = quiet_norm(x, weight, *ctx.rest)
        return *torch.autograd.grad(result, (x, weight), gradient), None, None, None


def reused_buffer(x, weight, eps, offset=None, cast_last=False):
    """Returns the same memory at every call, so that the next call changes the last result."""
    return _IntoBuffer.apply(x, weight, eps, offset, cast_last)


def reference_raises(x, weight, eps, offset=None, cast_last=False):
    raise LookupError("the reference is broken")


reference = norm_reference
