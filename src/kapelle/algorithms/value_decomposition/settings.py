"""Settings of value decomposition: utilities, their fit and the credit that follows. The networks are in `mixer_fit.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kapelle.algorithms.shared.monte_carlo import MonteCarlo
from kapelle.algorithms.shared.rewards import need_team_return
from kapelle.settings.base import FROM_HERE_ON, Settings


class Soft(Settings):
    """The target moves by a share τ of the way after every update of the fit."""

    name: Literal["soft"] = "soft"
    tau: float = Field(default=0.05, gt=0.0, le=1.0)
    """τ, the share."""


class Periodic(Settings):
    """The target is copied anew every so many updates of the fit."""

    name: Literal["periodic"]
    every: int = Field(default=100, ge=1)
    """Updates of the fit between two copies."""


class FitConfig(Settings):
    """How utilities and mixer are learned."""

    lr: float = Field(default=3e-3, gt=0.0)
    """Learning rate of the networks."""
    target: Literal["monte_carlo", "td"] = "monte_carlo"
    """What the team's value is fitted to: the return, or λ-returns of a target network."""
    lam: float = Field(default=0.0, ge=0.0, le=1.0)
    """λ of `target: td`, per round; 1 is Monte Carlo."""
    follow: Annotated[Soft | Periodic, Field(discriminator="name")] = Soft()
    """How the target network follows; read with `target: td`."""
    capacity: int = Field(default=256, ge=1)
    """Episodes that are remembered."""
    min_fill: int = Field(default=64, ge=1)
    """Episodes that must be remembered before anything is fitted."""
    updates: int = Field(default=100, ge=1)
    """Updates per step."""
    batch: int = Field(default=64, ge=1)
    """Episodes per update."""
    device: Annotated[str, FROM_HERE_ON] = "cpu"
    """Device of utilities and mixer."""


class UtilityConfig(Settings):
    """The network behind Q_i."""

    sharing: Literal["own", "shared"] = "own"
    """One network per agent, or one for all, which gets a vector of the agent whose turn it judges."""
    hidden: tuple[int, ...] = (64,)
    """Widths of its hidden layers."""
    identity: int = Field(default=8, ge=1)
    """Width of an agent's learned vector, with `sharing: shared`."""


class CreditMixer(MonteCarlo):
    """Settings of VDN and QMIX; each adds its name and its mixer."""

    gamma_turn: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount from one round to the next."""
    credit: Literal["difference", "modelled", "utility"] = "difference"
    """How a turn is credited; see `credit_mixer.py`."""
    credit_warmup_steps: int = Field(default=5, ge=0)
    """Steps in which turns are paid the team's return, while the mixer learns already."""
    embedder: str = "base"
    """What reads turns as vectors: `base` (of the first trained agent where they differ), the path or hub name of a model,
    or `sentence-transformers:NAME`."""
    embedder_device: Annotated[str | None, FROM_HERE_ON] = None
    """Device of an embedder that is a model of its own; null is that of `model.device`."""
    utility: UtilityConfig = UtilityConfig()
    fit: FitConfig = FitConfig()

    @model_validator(mode="after")
    def _one_return_for_all(self) -> CreditMixer:
        need_team_return(self.team_reward)
        if self.fit.min_fill > self.fit.capacity:
            raise ValueError("`fit.min_fill` is more than `fit.capacity` can hold; raise the capacity")
        if self.embedder_device is not None and self.embedder == "base":
            raise ValueError(
                "`embedder_device` moves a model of its own, and `embedder: base` is the team's base, which stays where it is; "
                "name that base's path as `embedder`, or set `model.device`"
            )
        return self
