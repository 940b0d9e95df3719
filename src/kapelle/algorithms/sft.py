"""Supervised fine-tuning: the likelihood of demonstrated turns.

Loss: −log π of every completion token, averaged over the tokens of the global batch. Data come from the
environment's records or scripted experts, playing the workflow in the roles of the team.

World model (`world_model` = w > 0): an agent also learns to predict its next observation. The tokens that its next
prompt adds to its last completion count like those of completions, each w times:
(Σ nll_written + w·Σ nll_observed) / (n_written + w·n_observed). The first prompt of a conversation is left out.
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
    """Settings of supervised fine-tuning."""

    name: Literal["sft"] = "sft"
    epochs: int = Field(default=1, ge=1)
    """Passes over each step's demonstrations."""
    minibatches: int = Field(default=1, ge=1)
    """Optimiser steps into which each pass is divided."""
    world_model: float = Field(default=0.0, ge=0.0)
    """Weight of a token that the agent observes next, against 1 for one that it writes."""

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return Algorithm(
            name=self.name,
            policy_loss=negative_log_likelihood,
            data=Data("demonstrations", observations=self.world_model),
            update=Update(self.epochs, self.minibatches),
            lacks="no demonstration has a turn of a trained agent",
        )


def negative_log_likelihood(outputs: Outputs, targets: Targets) -> Loss:
    """Return −Σ log π over the counted tokens, and their number; a column `weight` weighs them."""
    if Column.WEIGHT not in targets.columns:
        total, weight = token_mean(-outputs.logp_K, targets.mask_K)
        return Loss(total, weight, {"nll": (total.detach(), weight)})
    heard_K = torch.zeros_like(targets.mask_K)
    if targets.observed_S is not None:
        heard_K = targets.observed_S[targets.segment_K]
    heard_K, said_K = heard_K * targets.mask_K, (1.0 - heard_K) * targets.mask_K
    nll_K, weight_K = -outputs.logp_K, targets[Column.WEIGHT] * targets.mask_K
    return Loss(
        (nll_K * weight_K).sum(),
        weight_K.sum(),
        {
            "nll": ((nll_K.detach() * said_K).sum(), said_K.sum()),
            "nll_heard": ((nll_K.detach() * heard_K).sum(), heard_K.sum()),
        },
    )
