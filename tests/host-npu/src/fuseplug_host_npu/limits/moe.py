"""Routing of tokens to experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import sources
from .common import is_float, is_index, is_not_empty
from .registry import limit, require

_MOST_CHOICES = 512
_MOST_EXPERTS_CHOSEN = 1024
_MOST_INDICES = 1 << 24


@limit("npu_moe_gating_top_k_softmax", page="torch_npu-npu_moe_gating_top_k_softmax.md")
def gating_top_k_softmax(x: Tensor, finished: Tensor | None, k: int) -> None:
    """Each token has at least one expert, and at most all of them."""
    require(x.dim() in (2, 3), "x", "of 2 or 3 dims", x)
    is_float("x", x)
    most = min(x.shape[-1], _MOST_EXPERTS_CHOSEN)
    require(0 < k <= most, "k", f"1 to {most}", k)
    if finished is not None:
        require(finished.dtype == torch.bool, "finished", "bool", finished)
        require(finished.shape == x.shape[:-1], "finished", f"of x's shape but its last dim {list(x.shape)}", finished)


@limit("npu_moe_token_permute", page="torch_npu-npu_moe_token_permute.md")
def token_permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None, padded_mode: bool) -> None:
    """*indices* has one row for each token."""
    del num_out_tokens
    require(tokens.dim() == 2, "tokens", "of 2 dims", tokens)
    is_float("tokens", tokens)
    is_index("indices", indices)
    rows = indices.dim() in (1, 2) and indices.shape[0] == tokens.shape[0]
    require(rows, "indices", f"[{tokens.shape[0]}] or [{tokens.shape[0]}, top_k], as tokens has rows", indices)
    require(indices.dim() == 1 or indices.shape[1] <= _MOST_CHOICES, "indices", f"of top_k ≤ {_MOST_CHOICES}", indices)
    require(indices.numel() < _MOST_INDICES - 1, "indices", f"of fewer than {_MOST_INDICES - 1} elements", indices)
    require(not padded_mode, "padded_mode", "False", padded_mode)


@limit("npu_moe_token_unpermute", "_npu_moe_token_unpermute", page="torch_npu-npu_moe_token_unpermute.md")
def token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None,
    padded_mode: bool,
    restore_shape: Sequence[int] | None,
) -> None:
    """*sorted_indices* has the row of each (token, choice), in int32; *probs* has its weight, in a dtype of its own."""
    require(permuted_tokens.dim() == 2, "permuted_tokens", "of 2 dims", permuted_tokens)
    is_float("permuted_tokens", permuted_tokens)
    require(sorted_indices.dtype == torch.int32, "sorted_indices", "int32", sorted_indices)
    require(sorted_indices.dim() == 1, "sorted_indices", "of one dim", sorted_indices)
    require(not padded_mode, "padded_mode", "False", padded_mode)
    require(restore_shape is None, "restore_shape", "None", restore_shape)
    if probs is not None:
        is_float("probs", probs)
        require(probs.dim() == 2, "probs", "[tokens, top_k]", probs)
        require(probs.shape[1] <= _MOST_CHOICES, "probs", f"of top_k ≤ {_MOST_CHOICES}", probs)
        slots = sorted_indices.numel()
        require(probs.numel() == slots, "probs", f"of {slots} elements, as sorted_indices is", probs)


def _gradient(grad: Tensor, rows: int, indices: Tensor, probs: Tensor | None) -> None:
    """No size is zero, and there are at most 512 choices."""
    for name, size in (("rows", rows), ("top_k", 1 if probs is None else probs.shape[1])):
        require(size > 0, name, "above zero", size)
    is_not_empty("grad_unpermuted_tokens", grad)
    require(indices.dtype == torch.int32, "sorted_indices", "int32", indices)
    few = probs is None or probs.shape[1] <= _MOST_CHOICES
    require(few, "probs", f"of top_k ≤ {_MOST_CHOICES}", probs)


@limit("npu_moe_token_unpermute_grad", page=sources.UNPERMUTE_GRADIENT)
def token_unpermute_grad(
    permuted_tokens: Tensor, grad_unpermuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None, **_: object
) -> None:
    """As `_gradient`."""
    _gradient(grad_unpermuted_tokens, len(permuted_tokens), sorted_indices, probs)


@limit("npu_moe_token_unpermute_grad_v2", page=sources.UNPERMUTE_GRADIENT)
def token_unpermute_grad_v2(
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    permuted_tokens_size_0: int,
    probs: Tensor | None,
    **_: object,
) -> None:
    """As `_gradient`."""
    _gradient(grad_unpermuted_tokens, permuted_tokens_size_0, sorted_indices, probs)
