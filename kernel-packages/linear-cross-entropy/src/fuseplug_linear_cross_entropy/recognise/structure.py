"""Finds the head of a model that takes labels, and makes the examples on which it is tried."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fuseplug import Adapter, Compute, Consent, Example, Proposal, Rejection, Scope, Site, Target
from fuseplug.reading import names
from fuseplug_backends.dtypes import MODEL_DTYPES
from fuseplug_linear_cross_entropy.lazy_tensor.records import saves_are_hooked

from .lazy_logits import LazyLogits, lazy_linear

LABELS = ("labels", "shift_labels")
CONSENT = Consent(
    "lazy_logits",
    "the logits of training calls are computed only when something uses their values: type(outputs.logits) is then a "
    "subclass of Tensor, and after optimizer.step() they can no longer be computed",
)
_WIDTH = 32


@dataclass(frozen=True)
class HeadAdapter(Adapter):
    """Calls a linear cross-entropy in the place of a head and the loss of its logits.

    Attributes:
        variant: ``"linear"``; with a bias ``"linear-bias"``; with ``"-capped"`` where logits may be capped; with
            ``"-added"`` where the model may add a vector to them.
        checked: As in `fuseplug_linear_cross_entropy.recognise.lazy_logits.Logits`.
    """

    variant: str
    checked: frozenset[str]
    reads: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def bind(self, compute: Compute) -> Callable[..., Any]:
        """Return ``forward(module, input)``: `LazyLogits`, ``(..., vocabulary)``, for *input* ``(..., hidden)``."""
        checked = self.checked

        def forward(module: Any, input: Tensor) -> Any:  # noqa: A002 - nn.Linear's own name
            # A checkpoint in the model's forward calls the original later, outside the scope, and must save the same.
            if saves_are_hooked() and not getattr(_outside, "hooked", False):
                return NotImplemented
            return lazy_linear(compute, input, module.weight, module.bias, checked)

        return forward


class Mix(NamedTuple):
    """One combination to check.

    Attributes:
        dtype: The dtype of input and weight.
        after: The use that the model makes of the logits: a key of `AFTER`.
    """

    dtype: torch.dtype
    after: str


def match(site: Site) -> list[Proposal] | Rejection | None:
    """Say whether *site* is a model whose forward takes labels, and which module is its head."""
    model = site.module
    if not _takes_labels(type(model)):
        return None
    path = _head_of(model)
    if path is None:
        return None
    if isinstance(path, Rejection):
        return path
    head = model.get_submodule(path)
    if type(head).forward is not nn.Linear.forward:
        return Rejection(
            f"its head, {path}, is a {type(head).__module__}.{type(head).__qualname__}; a torch.nn.Linear is expected: "
            "if an adapter or quantisation replaced the head, leave the head out of it"
        )
    weight = head.weight
    if not isinstance(weight, Tensor) or weight.dtype not in MODEL_DTYPES:
        return Rejection(f"the weight of its head is {getattr(weight, 'dtype', weight)}; expected float32 or half")
    if weight.dim() == 2 and weight.shape[1] != getattr(head, "in_features", weight.shape[1]):
        return Rejection(f"the weight of its head, {path}, is sharded or packed: {list(weight.shape)}")
    bias = head.bias is not None
    dtypes = sorted(MODEL_DTYPES, key=lambda dtype: dtype is not weight.dtype)
    checked = [after for after, may in _RARE.items() if may(model, weight.shape[0])]
    afters = [after for after in AFTER if after not in _RARE or after in checked]
    # Every use of the logits in the dtype of the module; only the usual one in the others.
    mixes = [Mix(dtypes[0], after) for after in afters] + [Mix(dtype, "shifted") for dtype in dtypes[1:]]
    variant = "-".join(["linear", *(["bias"] if bias else []), *checked])
    return [
        Proposal(
            target=Target(path=path),
            adapters=(HeadAdapter(variant, frozenset(checked)),),
            example=functools.partial(_example, bias),
            mixes=tuple(mixes),
            # Of the logits, their products with a softcap's numbers, the gradient of each, and a gradient's sum.
            roundings=8.0,
            working_roundings=64.0,
            exact=False,
            scope=Scope(in_training),
            lazy=LazyLogits,
            consent=CONSENT,
            work=weight.shape[0] / weight.shape[-1],
        )
    ]


def _may_cap(model: nn.Module, vocabulary: int) -> bool:
    del vocabulary
    # A child without parameters may be the cap itself.
    called = (model, *(child for child in model.children() if next(child.parameters(), None) is None))
    return any("tanh" in names(type(module).forward, type(module)) for module in called)


def _may_add(model: nn.Module, vocabulary: int) -> bool:
    """Whether *model* itself holds a vector as long as the vocabulary (BART: ``final_logits_bias``)."""
    tensors = (*model.parameters(recurse=False), *model.buffers(recurse=False))
    return any(tensor.shape[-1:] == (vocabulary,) and tensor.numel() == vocabulary for tensor in tensors)


_RARE: dict[str, Callable[[nn.Module, int], bool]] = {"capped": _may_cap, "added": _may_add}
"""Uses of logits that only some models have. Kernels are checked on them, and serve them, if a model may have them."""


_outside = threading.local()
"""Its ``hooked`` is whether hooks saw what this thread saved for a backward, when it last called a model."""


def in_training(module: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Whether a call belongs to training: it has labels, or the model is in training mode."""
    _outside.hooked = saves_are_hooked()
    return module.training or any(arguments.get(name) is not None for name in LABELS)


def _takes_labels(cls: type[nn.Module]) -> bool:
    try:
        parameters = inspect.signature(cls.forward).parameters
    except (TypeError, ValueError):
        return False
    return any(name in parameters for name in LABELS)


def _head_of(model: nn.Module) -> str | Rejection | None:
    """The path of the head; the reason why the head cannot be used; or ``None`` if the model has no head."""
    ask = getattr(type(model), "get_output_embeddings", None)
    if ask is None:
        return None
    try:
        head = ask(model)
    except Exception as error:  # noqa: BLE001 - a third party's method may raise anything
        return Rejection(f"its get_output_embeddings() raises {type(error).__name__}: {error}")
    if head is None:
        return None
    paths = [path for path, module in model.named_modules() if module is head]
    return paths[0] if paths else Rejection(f"its head, a {type(head).__name__}, is not one of its modules")


def _example(bias: bool, mix: Mix, size: int, generator: torch.Generator) -> Example:
    """Hidden states ``(2, tokens, width)`` whose logits have several magnitudes, and a weight.

    A small *size* gives few rows of a vocabulary so small that no kernel compiles a program for them, however a check
    varies their number. A larger one gives a vocabulary that no kernel takes in one piece, and so many rows that no
    kernel leaves them to the reference. Beyond that, rows are wider instead of more, because logits take time and
    memory.
    """
    vocabulary = 61 if size < 1 << 12 else 8209
    width = _WIDTH if size < 1 << 16 else 32 * _WIDTH
    tokens = max(3, math.ceil(size / width / 2))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    scale = torch.tensor([1.0, 0.25, 4.0], device="cpu").repeat(math.ceil(tokens / 3))[:tokens]
    hidden = normal(2, tokens, width) * scale.view(1, tokens, 1)
    parameters = {"weight": (normal(vocabulary, width) / math.sqrt(width)).to(mix.dtype)}
    if bias:
        parameters["bias"] = normal(vocabulary).to(mix.dtype)
    return Example((hidden.to(mix.dtype),), parameters, after=AFTER[mix.after])


_SMOOTHING = 13 / 128
"""This has few bits, like every number that all rows of the losses below share: rounded to half precision, it would
bias all rows. A power of two would leave the original nothing to round, and a kernel no tolerance.
"""


def _labels(logits: Tensor) -> Tensor:
    """A label for each row. The first of every five rows and the last rows are ignored, to leave a power of two.

    The factor that the gradients of these rows share, one over their number, is then the same number in every dtype.
    Rounded, it would bias all of them.
    """
    count = logits.shape[:-1].numel()
    labels = (torch.arange(count, device=logits.device) * 7919 + 3) % logits.shape[-1]
    labels[::5] = -100
    left = 1 << max(0, (count - math.ceil(count / 5)).bit_length() - 1)
    labels[left + math.ceil(left / 4) :] = -100
    return labels


def _shifted(logits: Tensor) -> Tensor:
    """The usual loss of a causal model."""
    logits = logits.float()
    return functional.cross_entropy(logits.view(-1, logits.shape[-1]), _labels(logits))


def _summed(logits: Tensor) -> Tensor:
    """A trainer's loss of scaled logits, without the last token: summed, and divided by a number of items.

    The same is done with a smoothed loss, and with log-probabilities that trainers select.
    """
    logits = (logits * 0.25).float()
    cut = logits[..., :-1, :].contiguous() if logits.dim() > 1 else logits
    flat = cut.reshape(-1, logits.shape[-1])
    labels = _labels(flat)
    logprobs = -functional.log_softmax(flat, -1)
    of_label = logprobs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    smoothed = of_label * (1 - _SMOOTHING) + logprobs.sum(-1) * (_SMOOTHING / flat.shape[-1])
    selected = flat.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) - flat.logsumexp(-1)
    sums = [losses.masked_fill(labels < 0, 0).sum() for losses in (smoothed, selected)]
    return torch.stack((functional.cross_entropy(flat, labels, reduction="sum"), *sums)) * 0.140625


def _capped(logits: Tensor) -> Tensor:
    """Capped logits that are used twice: for the loss, and for a mean of the values."""
    logits = torch.tanh(logits / 3.0) * 3.0
    flat = logits.float().view(-1, logits.shape[-1])
    loss = functional.cross_entropy(flat, _labels(flat), label_smoothing=_SMOOTHING)
    return torch.stack((loss, logits.float().mean()))


def _added(logits: Tensor) -> Tensor:
    """The usual loss, with a vector added to each row of the logits."""
    vector = torch.linspace(-2, 2, logits.shape[-1], dtype=logits.dtype, device=logits.device)
    return _shifted(logits + vector)


AFTER: dict[str, Callable[[Tensor], Tensor]] = {
    "shifted": _shifted,
    "summed": _summed,
    "capped": _capped,
    "added": _added,
}
"""The uses that models make of logits, as far as they make a difference to a kernel."""
