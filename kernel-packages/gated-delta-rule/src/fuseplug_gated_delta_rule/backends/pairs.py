"""Products of the pairs of tokens in a chunk, each with the decay between the two."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 16
"""Rows that `PerChannel` multiplies out; a chunk has a multiple of them."""


_PARTS = 1 << 11
"""The first part of g is a multiple of one over this number: see `sums_in_parts`."""


class PerHead:
    """Products of pairs of tokens, if each head has one decay.

    Args:
        sums: The sums of g in each chunk, from `sums_in_parts`, ``(2, chunks, heads, tokens, 1)``.
        q: ``(chunks, heads, tokens, channels)``.
        k: As *q*.

    Attributes:
        qk: ``⟨q_i, k_j⟩ e^(G_i - G_j)`` for ``j ≤ i``, and 0 elsewhere, ``(chunks, heads, tokens, tokens)``.
        kk: The same products of k with itself.
    """

    def __init__(self, sums: Tensor, q: Tensor, k: Tensor) -> None:
        self._q, self._k = q, k
        self._decays = _decays((sums - sums.mT).sum(0))
        self.qk, self.kk = ((x @ k.mT).mul_(self._decays) for x in (q, k))

    def gradients(self, of_qk: Tensor, of_kk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients of q, of k as the first and as the second factor, and of g, ``(chunks, heads, tokens, 1)``."""
        products = (of_qk * self.qk).addcmul_(of_kk, self.kk)
        # A token's g is in the decay of each pair of an earlier token with this token or a later one.
        later = products.new_ones(products.shape[-2:]).triu_()
        of_g = (later @ products).tril_(-1).sum(-1, keepdim=True)
        of_qk, of_kk = of_qk * self._decays, of_kk * self._decays
        return of_qk @ self._k, of_kk @ self._k, (of_qk.mT @ self._q).add_(of_kk.mT @ self._k), of_g


class PerChannel:
    """`PerHead`, but each key channel has a decay; sums are ``(2, chunks, heads, tokens, channels)``.

    Rows are taken in blocks. The products of a block's rows with rows of earlier blocks are a matmul, whose factors
    include the decays since the block's first row, and those until it. Within a block, all pairs of rows are multiplied
    out.
    """

    def __init__(self, sums: Tensor, q: Tensor, k: Tensor) -> None:
        self._q, self._k = q, k
        blocks = _blocks(sums)
        first = blocks[..., :1, :]
        inside = (blocks - first).sum(0)
        self._near = _decays(inside.unsqueeze(-2) - inside.unsqueeze(-3), dim=-3)
        self._near_k = self._near * _blocks(k).unsqueeze(-3)
        self._since = inside.exp_().flatten(2, 3)
        self._far = []
        for block in range(first.shape[3]):
            rows, before = _rows(block)
            self._far.append((rows, before, (first[:, :, :, block] - sums[:, :, :, before]).sum(0).exp_()))
        self.qk, self.kk = self._product(q), self._product(k)

    def _product(self, x: Tensor) -> Tensor:
        product = x.new_zeros(*x.shape[:3], x.shape[2])
        inside = (self._near_k @ _blocks(x).unsqueeze(-1)).squeeze(-1)
        since = x * self._since
        for block, (rows, before, until) in enumerate(self._far):
            product[:, :, rows, rows] = inside[:, :, block]
            product[:, :, rows, before] = since[:, :, rows] @ (self._k[:, :, before] * until).mT
        return product

    def gradients(self, of_qk: Tensor, of_kk: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradients, as in `PerHead`; that of g is ``(chunks, heads, tokens, channels)``."""
        # The pair of a token with itself has no decay, and so no part in the gradient of g.
        of_itself = of_qk.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        of_second = torch.zeros_like(self._k)
        of_q, of_k = self._gradient(of_qk.tril(-1), self._q, of_second), self._gradient(of_kk, self._k, of_second)
        of_g = from_here((self._k * (of_k - of_second)).addcmul_(self._q, of_q))
        return of_q.addcmul_(of_itself, self._k), of_k, of_second.addcmul_(of_itself, self._q), of_g

    def _gradient(self, grad: Tensor, x: Tensor, of_second: Tensor) -> Tensor:
        """The gradient of *x* in its product with k; the gradient of k is added to *of_second*."""
        inside = torch.stack([grad[:, :, rows, rows] for rows, *_ in self._far], 2)
        gradient = (inside.unsqueeze(-2) @ self._near_k).flatten(2, 4)
        of_second += (self._near * inside.unsqueeze(-1) * _blocks(x).unsqueeze(-2)).sum(-3).flatten(2, 3)
        since = x * self._since
        for rows, before, until in self._far:
            far = grad[:, :, rows, before]
            gradient[:, :, rows] += (far @ (self._k[:, :, before] * until)).mul_(self._since[:, :, rows])
            of_second[:, :, before] += (far.mT @ since[:, :, rows]).mul_(until)
        return gradient


def sums_in_parts(g: Tensor) -> Tensor:
    """Sum *g*, ``(chunks, heads, tokens, channels)``, over the tokens of a chunk up to each token, in two parts.

    The error of a difference of two sums must be a rounding of the difference, not of the sums, and NPUs have no
    float64. So g is split into two parts, and each part is summed. The first part is a multiple of 2⁻¹¹. No g is below
    -110, and a chunk has 64 tokens, so sums and differences of first parts have 24 bits: they are exact in float32.
    Second parts are at most 2⁻¹², so the errors of their sums are small, too.

    Returns:
        ``(2, chunks, heads, tokens, channels)``. Take differences first, then the sum over the first dimension.
    """
    parts = g.new_empty(2, *g.shape)
    torch.mul(g, _PARTS, out=parts[0]).round_().div_(_PARTS)
    torch.sub(g, parts[0], out=parts[1])
    return parts.cumsum(3)


def from_here(x: Tensor) -> Tensor:
    """For each token of a chunk, the sum of *x* over this token and all later ones."""
    return x.flip(2).cumsum(2).flip(2)


def _blocks(x: Tensor) -> Tensor:
    return x.view(*x.shape[:-2], -1, BLOCK, x.shape[-1])


def _rows(block: int) -> tuple[slice, slice]:
    """The rows of *block*, and the rows before them."""
    start = block * BLOCK
    return slice(start, start + BLOCK), slice(start)


def _decays(differences: Tensor, dim: int = -2) -> Tensor:
    """``e^`` *differences* between rows, along *dim*, and rows up to them, along the next one; 0 for later rows."""
    rows = differences.shape[dim]
    later = torch.ones(rows, rows, dtype=torch.bool, device=differences.device).triu_(1)
    later = later.view(rows, rows, *[1] * (-2 - dim))
    return differences.masked_fill_(later, -math.inf).exp_()
