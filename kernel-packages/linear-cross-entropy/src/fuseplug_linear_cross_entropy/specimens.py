"""Small models with a head and a loss in plain PyTorch, written as real models are. The kernels are checked on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["specimens"]

HIDDEN, VOCABULARY, TOKENS = 24, 37, 9


def specimens() -> list[nn.Module]:
    """At least one model for each head, and for each step that models take between head and loss; some of odd width."""
    return [
        Causal(),
        Causal(hidden=7, vocabulary=13, bias=True),
        Causal().to(torch.bfloat16),
        Tied(),
        FromHiddenStates(),
        ShiftedLogits(),
        ScaledLogits(),
        Divided(),
        Softcapped(),
        Softcapped(hidden=7, vocabulary=13, bias=True),
        InHalf().to(torch.bfloat16),
        Summed(),
        Smoothed(),
        PerToken(),
        SlicedVocabulary(),
    ]


class Causal(nn.Module):
    """Like Llama: float32 logits, and shifted labels."""

    def __init__(self, hidden: int = HIDDEN, vocabulary: int = VOCABULARY, bias: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=bias)

    def get_output_embeddings(self) -> nn.Module:
        """The head, which transformers asks for by this name."""
        return self.lm_head

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """A call with labels, some of which do not count."""
        ids = (torch.arange(2 * TOKENS, device="cpu") * 7 + 3).view(2, TOKENS) % self.lm_head.out_features
        labels = ids.clone()
        labels[:, ::4] = -100
        return {"input_ids": ids, "labels": labels}

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """The loss, or ``None`` without *labels*, and the logits."""
        return self.after(functional.silu(self.embed_tokens(input_ids)), labels)

    def after(self, hidden: Tensor, labels: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The loss and the logits from the last hidden states."""
        logits = self.logits(hidden)
        return None if labels is None else self.loss(logits, labels), logits

    def logits(self, hidden: Tensor) -> Any:
        """The logits that the model returns."""
        return self.lm_head(hidden)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of the next token."""
        following = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return functional.cross_entropy(logits.float().view(-1, logits.shape[-1]), following.view(-1))


class Tied(Causal):
    """Like Gemma: the head has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head.weight = self.embed_tokens.weight


class FromHiddenStates(Causal):
    """Only the head, like the last stage of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        del self.embed_tokens

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Hidden states and labels."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, TOKENS, self.lm_head.in_features, generator=generator, device="cpu")
        return {"hidden_states": hidden, "labels": super().dummy_inputs["labels"]}

    def forward(self, hidden_states: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """The loss and the logits."""
        return self.after(hidden_states, labels)


class ShiftedLogits(Causal):
    """Like remote code that shifts the logits instead of the labels."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of the next token."""
        logits = logits.float()
        before = logits[..., :-1, :].contiguous().view(-1, logits.shape[-1])
        loss: Tensor = nn.CrossEntropyLoss()(before, labels[..., 1:].contiguous().view(-1))
        return loss


class ScaledLogits(Causal):
    """Like Cohere: multiplied logits."""

    def logits(self, hidden: Tensor) -> Any:
        """The logits, multiplied by a number."""
        return super().logits(hidden) * 0.0625


class Divided(Causal):
    """Like Granite: divided logits."""

    def logits(self, hidden: Tensor) -> Any:
        """The logits, divided by a number."""
        return super().logits(hidden) / 8.0


class Softcapped(Causal):
    """Like Gemma 2: capped logits."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor | None, Tensor]:
        """The loss and the capped logits."""
        logits = self.lm_head(functional.silu(self.embed_tokens(input_ids)))
        logits = logits / 3.0
        logits = torch.tanh(logits)
        logits = logits * 3.0
        return None if labels is None else self.loss(logits, labels), logits


class InHalf(Causal):
    """Like older models: the loss of logits that are not widened."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of the same token."""
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


class Summed(Causal):
    """Like a model under gradient accumulation: a sum, divided by the number of items in all batches."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of the same token."""
        flat = logits.float().reshape(-1, logits.size(-1))
        return functional.cross_entropy(flat, labels.reshape(-1), ignore_index=-100, reduction="sum") / 29


class Smoothed(Causal):
    """With label smoothing."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of the same token."""
        flat = logits.flatten(0, 1).to(torch.float32)
        return functional.cross_entropy(flat, labels.flatten(), label_smoothing=0.1)


class PerToken(Causal):
    """With a weight for each token."""

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of the same token."""
        flat = logits.float().view(-1, logits.shape[-1])
        losses = functional.cross_entropy(flat, labels.view(-1), reduction="none")
        return (losses * torch.linspace(0.5, 1.5, len(losses), dtype=losses.dtype, device=losses.device)).sum()


class SlicedVocabulary(Causal):
    """Like a model with a padded vocabulary: the logits of the padding are cut off."""

    def logits(self, hidden: Tensor) -> Any:
        """The logits without the last five."""
        return super().logits(hidden)[..., : VOCABULARY - 5]

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """A call with labels, all below the cut."""
        inputs = super().dummy_inputs
        return inputs | {"labels": inputs["labels"].clamp(max=VOCABULARY - 6)}
