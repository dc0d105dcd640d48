"""How many bytes and operations a step of a model takes, counted from its parameters."""

from __future__ import annotations

from dataclasses import dataclass

from piecework.models.config import ModelConfig


@dataclass(frozen=True)
class Cost:
    """Counts of one model. Attention itself is left out: it grows with the context, not with the model.

    `dense` are the parameters that every token is multiplied with, `head` those of the output head,
    `experts` those of all experts together, of which a token meets `top_k` of `num_experts`.
    """

    dense: int
    head: int
    experts: int
    num_experts: int
    top_k: int
    itemsize: float

    def step_bytes(self, rows: int) -> float:
        """Return the weight bytes that a decode step of `rows` sequences reads.

        Experts that no row chose are not read; rows are taken to choose evenly and independently.
        """
        share = 1.0
        if self.num_experts:
            share = 1.0 - (1.0 - self.top_k / self.num_experts) ** rows
        return (self.dense + self.head + self.experts * share) * self.itemsize

    def token_flops(self, *, head: bool) -> float:
        """Return the operations for one token, two a parameter, with or without the output head."""
        share = self.top_k / self.num_experts if self.num_experts else 1.0
        return 2.0 * (self.dense + self.experts * share + (self.head if head else 0))


def model_cost(config: ModelConfig, weight_bytes: int) -> Cost:
    """Count the parameters of `config` by what they do; `weight_bytes` is what all of them take in memory."""
    import torch

    from piecework.models.build import build_model

    model = build_model(config, dtype=torch.bfloat16, device="meta", max_positions=1)
    total = embedding = head = experts = 0
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        if "embed_tokens" in name:
            embedding += parameter.numel()
        elif "lm_head" in name:
            head += parameter.numel()
        elif ".experts." in name:
            experts += parameter.numel()
    return Cost(
        dense=total - embedding - head - experts,
        head=head or embedding,  # a tied head is the embedding, read as a whole
        experts=experts,
        num_experts=config.num_experts or 0,
        top_k=config.num_experts_per_tok or 0,
        itemsize=weight_bytes / total,
    )
