"""SFT: supervised fine-tuning on demonstrated turns.

    loss = −Σ log π(token) / number of tokens

The sum is over the completion tokens of the global batch. The demonstrations are the environment's records, or come from its
scripted experts, which run the workflow in the team's roles.

World model (`world_model` = w > 0). An agent also learns to predict its next observation. The tokens that the next prompt
adds after the agent's last completion have weight w:

    (Σ nll_written + w·Σ nll_observed) / (n_written + w·n_observed)

The first prompt of a conversation is not included in the loss.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kapelle.algorithm import Algorithm, Data, Loss, Outputs, Targets, Update
from kapelle.functional.masking import token_mean
from kapelle.rows import Column
from kapelle.runtime.on_demand import torch
from kapelle.settings.base import Settings


class SFT(Settings):
    """Settings of SFT (supervised fine-tuning)."""

    name: Literal["sft"] = "sft"
    epochs: int = Field(default=1, ge=1)
    """The number of passes over the demonstrations of each step."""
    minibatches: int = Field(default=1, ge=1)
    """The number of optimiser steps into which each pass over the samples is divided."""
    world_model: float = Field(default=0.0, ge=0.0)
    """The loss weight of a token of the agent's next observation. The weight of a token that the agent writes is 1."""

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return Algorithm(
            name=self.name,
            policy_loss=negative_log_likelihood,
            data=Data("demonstrations", observations=self.world_model),
            update=Update(self.epochs, self.minibatches),
            lacks="no demonstration has a turn of a trained agent",
        )


def negative_log_likelihood(outputs: Outputs, targets: Targets) -> Loss:
    """Return −Σ log π over the target tokens and the number of tokens.

    Both numbers are weighted by the column `weight` if the column exists.
    """
    if Column.WEIGHT not in targets.columns:
        total, weight = token_mean(-outputs.logp_K, targets.mask_K)
        return Loss(total, weight, {"nll": (total.detach(), weight)})
    observed_K = torch.zeros_like(targets.mask_K)
    if targets.observed_S is not None:
        observed_K = targets.observed_S[targets.segment_K]
    observed_K, written_K = observed_K * targets.mask_K, (1.0 - observed_K) * targets.mask_K
    nll_K, weight_K = -outputs.logp_K, targets[Column.WEIGHT] * targets.mask_K
    return Loss(
        (nll_K * weight_K).sum(),
        weight_K.sum(),
        {
            "nll": ((nll_K.detach() * written_K).sum(), written_K.sum()),
            "nll_heard": ((nll_K.detach() * observed_K).sum(), observed_K.sum()),
        },
    )
