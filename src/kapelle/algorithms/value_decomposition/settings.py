"""Settings of value decomposition: utilities, their fit and the credit. The networks are in `mixer_fit.py`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kapelle.algorithms.shared.monte_carlo import MonteCarlo
from kapelle.algorithms.shared.rewards import need_team_return
from kapelle.settings.base import FROM_HERE_ON, Settings


class Soft(Settings):
    """Target network that moves towards the fitted network by a share τ after every update of the fit."""

    name: Literal["soft"] = "soft"
    tau: float = Field(default=0.05, gt=0.0, le=1.0)
    """τ, the share per update."""


class Periodic(Settings):
    """Target network that becomes a copy of the fitted network every `every` updates."""

    name: Literal["periodic"]
    every: int = Field(default=100, ge=1)
    """Updates of the fit between two copies."""


class FitConfig(Settings):
    """Settings of the fit of utilities and mixer."""

    lr: float = Field(default=3e-3, gt=0.0)
    """Learning rate of the networks."""
    target: Literal["monte_carlo", "td"] = "monte_carlo"
    """Target of the team's value: the return, or λ-returns of a target network."""
    lam: float = Field(default=0.0, ge=0.0, le=1.0)
    """λ of `target: td`, per round; 1 is Monte Carlo."""
    follow: Annotated[Soft | Periodic, Field(discriminator="name")] = Soft()
    """Rule by which the target network follows the fitted network; used with `target: td`."""
    capacity: int = Field(default=256, ge=1)
    """Capacity of the replay buffer, in episodes."""
    min_fill: int = Field(default=64, ge=1)
    """Episodes in the replay buffer before the first fit."""
    updates: int = Field(default=100, ge=1)
    """Updates per step."""
    batch: int = Field(default=64, ge=1)
    """Episodes per update."""
    device: Annotated[str, FROM_HERE_ON] = "cpu"
    """Device of the utilities and the mixer."""


class UtilityConfig(Settings):
    """Settings of the network for Q_i."""

    sharing: Literal["own", "shared"] = "own"
    """One network per agent (`own`), or one for all with a learned vector per agent (`shared`)."""
    hidden: tuple[int, ...] = (64,)
    """Widths of the hidden layers."""
    identity: int = Field(default=8, ge=1)
    """Width of an agent's learned vector, with `sharing: shared`."""


class CreditMixer(MonteCarlo):
    """Settings of VDN and QMIX; each adds its name and its mixer."""

    gamma_turn: float = Field(default=1.0, ge=0.0, le=1.0)
    """Discount from one round to the next."""
    credit: Literal["difference", "modelled", "utility"] = "difference"
    """Form of the credit; see `credit_mixer.py`."""
    credit_warmup_steps: int = Field(default=5, ge=0)
    """Steps in which the advantage uses the team's return, while the mixer already learns."""
    embedder: str = "base"
    """Model that embeds turns: `base` (that of the first trained agent if bases differ), a model's path or hub name, or
    `sentence-transformers:NAME`."""
    embedder_device: Annotated[str | None, FROM_HERE_ON] = None
    """Device of a separate embedder; null is `model.device`."""
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
