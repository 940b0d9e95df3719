"""Settings of value decomposition: the utilities, the fit of the networks, and the credit.

The networks are defined in `mixer_fit.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kapelle.algorithms.shared.monte_carlo import MonteCarlo
from kapelle.algorithms.shared.rewards import need_team_return
from kapelle.settings.base import FROM_HERE_ON, Settings


class Soft(Settings):
    """Settings of soft updates: after every update of the fit, the target network moves towards the fitted network by a share τ."""

    name: Literal["soft"] = "soft"
    tau: float = Field(default=0.05, gt=0.0, le=1.0)
    """τ, the share by which the target network moves towards the fitted network per update."""


class Periodic(Settings):
    """Settings of periodic updates: every `every` updates of the fit, a copy of the fitted network replaces the target network."""

    name: Literal["periodic"]
    every: int = Field(default=100, ge=1)
    """The number of updates of the fit between two copies."""


class FitConfig(Settings):
    """Settings of the fit of the utilities and the mixer."""

    lr: float = Field(default=3e-3, gt=0.0)
    """The learning rate of the utilities and the mixer."""
    target: Literal["monte_carlo", "td"] = "monte_carlo"
    """The target of the team's value: the Monte Carlo return (`monte_carlo`), or λ-returns computed with a target network
    (`td`)."""
    lam: float = Field(default=0.0, ge=0.0, le=1.0)
    """λ of the λ-returns, per round. This setting is used only with `target: td`; with 1, the target is the Monte Carlo
    return."""
    follow: Annotated[Soft | Periodic, Field(discriminator="name")] = Soft()
    """How the target network follows the fitted network. This setting is used only with `target: td`."""
    capacity: int = Field(default=256, ge=1)
    """The capacity of the replay buffer, in episodes."""
    min_fill: int = Field(default=64, ge=1)
    """The minimum number of episodes in the replay buffer for the first fit."""
    updates: int = Field(default=100, ge=1)
    """The number of updates of the networks per training step."""
    batch: int = Field(default=64, ge=1)
    """The number of episodes in the batch of each update."""
    device: Annotated[str, FROM_HERE_ON] = "cpu"
    """The device of the utilities and the mixer."""


class UtilityConfig(Settings):
    """Settings of the utility networks Q_i."""

    sharing: Literal["own", "shared"] = "own"
    """Whether each agent has its own network (`own`), or all agents share one network that also reads a learned vector per
    agent (`shared`)."""
    hidden: tuple[int, ...] = (64,)
    """The widths of the hidden layers."""
    identity: int = Field(default=8, ge=1)
    """The width of the learned vector of an agent. This setting is used only with `sharing: shared`."""


class CreditMixer(MonteCarlo):
    """Settings that VDN and QMIX have in common. Each of them adds its name and its mixer."""

    gamma_turn: float = Field(default=1.0, ge=0.0, le=1.0)
    """The discount from one round to the next."""
    credit: Literal["difference", "modelled", "utility"] = "difference"
    """The form of the credit, as described in `credit_mixer.py`."""
    credit_warmup_steps: int = Field(default=5, ge=0)
    """The number of steps at the start in which the advantage is computed from the team's return, while the mixer is already
    being fitted."""
    embedder: str = "base"
    """The model that computes embeddings of turns. The value is `base` (the base model of the agents, or of the first trained
    agent if base models differ), the path or hub name of a model, or `sentence-transformers:NAME`."""
    embedder_device: Annotated[str | None, FROM_HERE_ON] = None
    """The device of a separate embedding model. With null, the device is `model.device`."""
    utility: UtilityConfig = UtilityConfig()
    fit: FitConfig = FitConfig()

    @model_validator(mode="after")
    def _one_return_for_all(self) -> CreditMixer:
        need_team_return(self.team_reward)
        if self.fit.min_fill > self.fit.capacity:
            raise ValueError("`fit.min_fill` exceeds `fit.capacity`; raise the capacity")
        if self.embedder_device is not None and self.embedder == "base":
            raise ValueError(
                "`embedder_device` needs a separate embedder, but `embedder: base` is the team's base; set the base's path as "
                "`embedder`, or set `model.device`"
            )
        return self
