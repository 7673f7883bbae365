"""The selective scan of one chunk of tokens, forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Inputs(NamedTuple):
    """The tensor arguments, or parts of them, in the shapes that the reference takes."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    delta_bias: Tensor | None


class Chunk:
    """A chunk of tokens, with the values that both forward and backward need.

    Tensors are ``(tokens, batch, channels)`` or ``(tokens, batch, states, channels)``, in the dtype of the state.

    Args:
        delta_softplus: Whether each step goes through a softplus.
        inputs: The arguments for the tokens of the chunk.
        state: The state before the chunk, ``(batch, states, channels)``, in the dtype of the computation.
    """

    def __init__(self, delta_softplus: bool, inputs: Inputs, state: Tensor) -> None:
        self.delta_softplus, self.before, self.dtype = delta_softplus, state, state.dtype
        self.x, self.B, self.C = (self._by_token(tensor) for tensor in (inputs.x, inputs.B, inputs.C))
        self.z = None if inputs.z is None else self._by_token(inputs.z)
        self.D = None if inputs.D is None else inputs.D.to(self.dtype)
        self.A = inputs.A.mT.to(self.dtype).contiguous()
        self.unbounded = self._by_token(inputs.dt)
        """The steps before the softplus."""
        if inputs.delta_bias is not None:
            self.unbounded = self.unbounded + inputs.delta_bias.to(self.dtype)
        self.dt = functional.softplus(self.unbounded) if delta_softplus else self.unbounded
        self.dt_x = self.dt * self.x
        self.decays = (self.dt.unsqueeze(2) * self.A).exp_()
        self.states = self.B.unsqueeze(3) * self.dt_x.unsqueeze(2)
        for decay, now in zip(self.decays.unbind(), self.states.unbind(), strict=True):
            state = now.addcmul_(decay, state)

    def _by_token(self, tensor: Tensor) -> Tensor:
        """*tensor*, ``(batch, channels, tokens)``, as ``(tokens, batch, channels)``; it may be a view."""
        return tensor.permute(2, 0, 1).to(self.dtype).contiguous()

    def _read(self) -> Tensor:
        """The result before the gate: ``h C + D x``."""
        y = _over_states(self.C, self.states)
        return y if self.D is None else y.addcmul_(self.x, self.D)

    def result(self) -> Tensor:
        """The result, ``(tokens, batch, channels)``."""
        return self._read() if self.z is None else self._read().mul_(functional.silu(self.z))

    def gradients(self, of_result: Tensor, of_state: Tensor) -> dict[str, Tensor]:
        """The gradients of the inputs by name, in the inputs' shapes; ``state`` is the gradient of the state before.

        Args:
            of_result: The gradient of the result, ``(batch, channels, tokens)``.
            of_state: The gradient of the state after the chunk, ``(batch, states, channels)``.
        """
        gradients = {}
        of_y = self._by_token(of_result)
        if self.z is not None:
            gate = self.z.sigmoid()
            gradients["z"] = of_y * self._read() * gate * (1 + self.z * (1 - gate))
            of_y = of_y * self.z * gate
        if self.D is not None:
            gradients["D"] = (of_y * self.x).sum((0, 1))
        of_states = self._of_states(of_y, of_state)
        gradients["C"] = (self.states * of_y.unsqueeze(2)).sum(3)
        gradients["B"] = (of_states * self.dt_x.unsqueeze(2)).sum(3)
        of_dt_x = _over_states(self.B, of_states)
        gradients["x"] = of_dt_x * self.dt
        if self.D is not None:
            gradients["x"].addcmul_(of_y, self.D)
        gradients["state"] = of_states[0] * self.decays[0]
        # The gradient of dt A, the logarithms of the decays.
        of_logarithms = of_states.mul_(self.decays)
        of_logarithms[0] *= self.before
        of_logarithms[1:] *= self.states[:-1]
        gradients["A"] = (of_logarithms * self.dt.unsqueeze(2)).sum((0, 1)).mT
        of_dt = (of_logarithms * self.A).sum(2).addcmul_(of_dt_x, self.x)
        gradients["dt"] = of_dt * self.unbounded.sigmoid() if self.delta_softplus else of_dt
        gradients["delta_bias"] = gradients["dt"].sum((0, 1))
        return {
            name: gradient.permute(1, 2, 0) if name in ("x", "dt", "B", "C", "z") else gradient
            for name, gradient in gradients.items()
        }

    def _of_states(self, of_y: Tensor, of_state: Tensor) -> Tensor:
        """The gradient of the state after each token, from the token's own result and from everything later."""
        gradients = self.C.unsqueeze(3) * of_y.unsqueeze(2)
        gradients[-1] += of_state
        by_token, decays = gradients.unbind(), self.decays.unbind()
        for token in reversed(range(len(by_token) - 1)):
            by_token[token].addcmul_(decays[token + 1], by_token[token + 1])
        return gradients


def _over_states(weights: Tensor, states: Tensor) -> Tensor:
    """The sum over the states of each channel, weighted by *weights*, ``(tokens, batch, states)``."""
    return torch.matmul(weights.unsqueeze(2), states).squeeze(2)
