"""A head like those that TRL's trainers put on a model: a forward of the instance that calls a function of autograd."""

import functools
import math
import sys
import types
from pathlib import Path

import torch

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def logits_of(hidden, weight, bias, temperature, cap, scale):
    """The logits, and the factor by which their gradient is multiplied."""
    z = torch.mm(hidden, weight.to(hidden.dtype).t())
    if bias is not None:
        z = z.add_(bias)
    z = z.float() * scale
    slope = scale / temperature
    if cap is not None:
        bent = torch.tanh(z / cap)
        z, slope = cap * bent, slope * (1 - bent * bent)
    return z / temperature, slope


class Scores(torch.autograd.Function):
    """What TRL's ``ChunkedLogProbFunction`` computes, with all logits in memory."""

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        targets,
        temperature,
        chunk_size,
        final_logit_softcapping=None,
        logit_scale=1.0,
        outputs=OUTPUTS,
    ):
        ctx.set_materialize_grads(False)
        ctx.kernel_args = (temperature, final_logit_softcapping, logit_scale)
        z, _ = logits_of(hidden, weight, bias, *ctx.kernel_args)
        top = z.amax(-1)
        log_z = top + torch.log(torch.exp(z - top.unsqueeze(-1)).sum(-1))
        p = torch.exp(z - log_z.unsqueeze(-1))
        of_label = z.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        entropy = log_z - (p * z).sum(-1)
        is_before = torch.arange(z.shape[-1], device=z.device) < targets.unsqueeze(-1)
        is_top1 = (of_label >= top) & (of_label > z.masked_fill(~is_before, -math.inf).amax(-1))
        rest = (torch.log((p * p).sum(-1)), z.sum(-1) / z.shape[-1], is_top1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.mark_non_differentiable(*rest)
        entropy, *rest = (
            value if name in outputs else None for name, value in zip(OUTPUTS, (entropy, *rest), strict=True)
        )
        return of_label - log_z, entropy, *rest

    @staticmethod
    def backward(ctx, of_logprob, of_entropy, *_):
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        z, slope = logits_of(hidden, weight, bias, *ctx.kernel_args)
        log_p = z - log_z.unsqueeze(-1)
        p = torch.exp(log_p)
        grad = torch.zeros_like(z)
        if of_logprob is not None:
            is_target = torch.arange(z.shape[-1], device=z.device) == targets.unsqueeze(-1)
            grad = grad + of_logprob.unsqueeze(-1) * (is_target.float() - p)
        if of_entropy is not None:
            grad = grad - of_entropy.unsqueeze(-1) * p * (log_p + entropy.unsqueeze(-1))
        grad = grad * slope
        of_weight = torch.mm(grad.t(), hidden.float()).to(weight.dtype)
        of_bias = None if bias is None else grad.sum(0).to(bias.dtype)
        return torch.mm(grad, weight.float()).to(hidden.dtype), of_weight, of_bias, None, None, None, None, None, None


def add_head(model, temperature=0.7, outputs=OUTPUTS):
    """Put a head on *model*: ``model(..., labels=labels, scored=True)`` then returns the results, by name."""
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def scoring_forward(self, *args, scored=False, labels=None, **kwargs):
        if not scored:
            return original_forward(*args, labels=labels, **kwargs)
        hidden, labels, head = self.model(*args, **kwargs)[0][:, :-1], labels[:, 1:], self.get_output_embeddings()
        rows = hidden.reshape(-1, hidden.shape[-1])
        results = Scores.apply(
            rows, head.weight, head.bias, labels.reshape(-1), temperature, 16, None, 1.0, ("log_probs", *outputs)
        )
        return dict(zip(("log_probs", *OUTPUTS), results, strict=True))

    model.forward = types.MethodType(scoring_forward, model)
    return model.forward


def rewritten(old, new):
    """A copy of this module whose source has *new* in place of *old*."""
    source = Path(__file__).read_text()
    assert source.count(old) == 1, old
    module = types.ModuleType("support.trainer_head_rewritten")
    sys.modules[module.__name__] = module
    exec(compile(source.replace(old, new), "<rewritten>", "exec"), vars(module))
    return module
