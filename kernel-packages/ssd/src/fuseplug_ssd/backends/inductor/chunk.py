"""A chunk of tokens of Mamba-2's recurrence, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...reference import Step

_NOTHING = -1e4
"""The logarithm of a decay that is 0 in every dtype."""


class Inputs(NamedTuple):
    """The tensors among the arguments, or parts of them, as the reference takes them, without the states before."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    dt_bias: Tensor | None


class Chunk:
    """A chunk of tokens: what forward and backward both compute of it.

    Let a be the sums of the logarithms ``dt A`` since it began, and h the states before it. Then its result is
    ``(C Bᵀ ∘ e^(a_l - a_s)) (dt x) + e^a C h``, with pairs of a token l and an earlier one s, or itself; and the states
    after it are ``e^(a_last) h + (e^(a_last - a) dt x)ᵀ B`` (Dao & Gu 2024, arXiv:2405.21060, section 6). No factor is
    the inverse of a decay. All heads of a group share ``C Bᵀ``.

    Tensors are ``(groups, heads of a group, tokens, width)`` or ``(groups, tokens, states)``, where groups are those of
    the whole batch, in the dtype of the states.

    Args:
        step: How the size of a step is made.
        inputs: The arguments for its tokens.
        state: ``(batch, heads, width, states)`` before it, in the dtype in which everything is computed.
    """

    def __init__(self, step: Step, inputs: Inputs, state: Tensor) -> None:
        self.dtype, self.step = state.dtype, step
        self.batch, self.tokens, _, self.width = inputs.x.shape
        self.groups, states = inputs.B.shape[2:]
        self.before = state.reshape(self.batch * self.groups, -1, states)
        self.x = self._by_head(inputs.x)
        self.B, self.C = (
            tensor.transpose(1, 2).to(self.dtype).reshape(-1, self.tokens, states) for tensor in (inputs.B, inputs.C)
        )
        self.A, self.D = self._of_heads(inputs.A), None if inputs.D is None else self._of_heads(inputs.D)
        self.sums = self._by_head(inputs.dt.unsqueeze(-1)).squeeze(-1)
        """Of dt and its bias."""
        if inputs.dt_bias is not None:
            self.sums = self.sums + self._of_heads(inputs.dt_bias)
        self.dt = step.size(self.sums)
        self.dt_x = self.x * self.dt.unsqueeze(-1)
        # In float64, so that the rounding of a difference is that of the difference and not of the sums; to that end
        # no decay is stronger than one that leaves nothing.
        logarithms = (self.dt.double() * self.A).clamp(min=_NOTHING).cumsum(-1)
        self.decays = (logarithms.unsqueeze(-1) - logarithms.unsqueeze(-2)).to(self.dtype).exp_().tril_()
        self.since, self.until = (t.to(self.dtype).exp() for t in (logarithms, logarithms[..., -1:] - logarithms))
        self.weights = self.decays * (self.C @ self.B.mT).unsqueeze(1)

    def _of_heads(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(heads,)``, for each group of the batch: ``(groups, heads of a group, 1)``."""
        return tensor.to(self.dtype).view(self.groups, -1, 1).repeat(self.batch, 1, 1)

    def _by_head(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(batch, tokens, heads, width)``, as most of what is here lies."""
        shape = (self.batch * self.groups, -1, *tensor.shape[1::2])
        return tensor.transpose(1, 2).to(self.dtype).reshape(shape)

    def _from_heads(self, tensor: Tensor) -> Tensor:
        """The other way round; perhaps a view."""
        return tensor.reshape(self.batch, -1, *tensor.shape[2:]).transpose(1, 2)

    def _from_groups(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(groups, tokens, states)``, as ``(batch, tokens, groups, states)``."""
        return tensor.view(self.batch, -1, *tensor.shape[1:]).transpose(1, 2)

    def _by_token(self, tensor: Tensor) -> Tensor:
        """*tensor*, by head, as ``(groups, tokens, heads of a group × width)``."""
        return tensor.transpose(1, 2).reshape(len(tensor), self.tokens, -1)

    def _read(self, states: Tensor, by: Tensor) -> Tensor:
        """What *by*, B or C, reads of *states*, by head."""
        return (by @ states.mT).view(len(by), self.tokens, -1, self.width).transpose(1, 2)

    def _scaled(self, states: Tensor) -> Tensor:
        """*states*, decayed through the chunk."""
        through = self.since[..., -1:].repeat_interleave(self.width, 1)
        return states * through

    def result(self) -> Tensor:
        """The result, ``(batch, tokens, heads, width)``."""
        y = self.weights @ self.dt_x
        y.addcmul_(self._read(self.before, self.C), self.since.unsqueeze(-1))
        return self._from_heads(y if self.D is None else y.addcmul_(self.x, self.D.unsqueeze(-1)))

    def after(self) -> Tensor:
        """The states after it, ``(batch, heads, width, states)``."""
        written = self._by_token(self.dt_x * self.until.unsqueeze(-1))
        states = self._scaled(self.before).baddbmm_(written.mT, self.B)
        return states.view(self.batch, -1, self.width, states.shape[-1])

    def gradients(self, of_result: Tensor, of_state: Tensor) -> dict[str, Tensor]:
        """The gradients of the inputs by name, in their shapes; and ``state``, that of the states before.

        Args:
            of_result: ``(batch, tokens, heads, width)``.
            of_state: ``(batch, heads, width, states)``, of the states after the chunk.
        """
        of_y, of_after = self._by_head(of_result), of_state.reshape(self.before.shape)
        of_weights = of_y @ self.dt_x.mT
        of_scores = (of_weights * self.decays).sum(1)
        of_written = self._read(of_after, self.B) * self.until.unsqueeze(-1)
        of_dt_x = (self.weights.mT @ of_y).add_(of_written)
        read = self._by_token(of_y * self.since.unsqueeze(-1))
        written = self._by_token(self.dt_x * self.until.unsqueeze(-1))
        # Of dt A: what decays between each pair, what is read of the states before, what is written into those after.
        of_logarithms = _between(of_weights.mul_(self.weights))
        of_logarithms += _from_here((of_y * self._read(self.before, self.C)).sum(-1).mul_(self.since))
        of_logarithms += _until_here((self.dt_x * of_written).sum(-1))
        staying = (of_after * self._scaled(self.before)).sum(-1)
        of_logarithms += staying.view(*of_logarithms.shape[:2], self.width).sum(-1, keepdim=True)
        of_dt = (of_logarithms * self.A).add_((of_dt_x * self.x).sum(-1))
        of_sums = self._of_sums(of_dt)
        of_x = of_dt_x * self.dt.unsqueeze(-1)
        gradients = {
            "B": self._from_groups((of_scores.mT @ self.C).baddbmm_(written, of_after)),
            "C": self._from_groups((of_scores @ self.B).baddbmm_(read, self.before)),
            "A": self._over_tokens(of_logarithms * self.dt),
            "dt": self._from_heads(of_sums.unsqueeze(-1)).squeeze(-1),
            "dt_bias": self._over_tokens(of_sums),
            "state": self._scaled(of_after).baddbmm_(read.mT, self.C).view(of_state.shape),
        }
        if self.D is not None:
            gradients["D"] = self._over_tokens((of_y * self.x).sum(-1))
            of_x.addcmul_(of_y, self.D.unsqueeze(-1))
        return gradients | {"x": self._from_heads(of_x)}

    def _of_sums(self, of_dt: Tensor) -> Tensor:
        """The gradients of dt with its bias, from those of the sizes of the steps."""
        with torch.enable_grad():
            sums = self.sums.detach().requires_grad_()
            size = self.step.size(sums)
        return torch.autograd.grad(size, sums, of_dt)[0]

    def _over_tokens(self, tensor: Tensor) -> Tensor:
        """The sums of *tensor*, by head, over batch and tokens: ``(heads,)``."""
        return tensor.view(self.batch, -1, self.tokens).sum((0, 2))


def _between(pairs: Tensor) -> Tensor:
    """For each token the sum of *pairs* between it or a later one and an earlier one.

    All that is added is; a difference of sums over rows and columns would lose what is small.
    """
    ones = pairs.new_ones(pairs.shape[-2:]).triu_()
    return (ones @ pairs).tril_(-1).sum(-1)


def _from_here(tokens: Tensor) -> Tensor:
    """For each token the sum of *tokens* from it on."""
    return tokens.flip(-1).cumsum(-1).flip(-1)


def _until_here(tokens: Tensor) -> Tensor:
    """For each token the sum of *tokens* before it."""
    return torch.nn.functional.pad(tokens[..., :-1].cumsum(-1), (1, 0))
