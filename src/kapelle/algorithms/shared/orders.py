"""Order of updates: which policies an update moves, and whether together or one after another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field

from kapelle.algorithm import Order
from kapelle.errors import ConfigError
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.base import Settings
from kapelle.team import Team


class Joint(Settings):
    """All policies at once, in one pass."""

    name: Literal["joint"] = "joint"

    def build(self) -> Order:
        """Return the order."""
        return Order()


class Alternate(Settings):
    """One policy at a time, each for `interval` steps (MARFT's `train_cycle`); critics learn at every step."""

    name: Literal["alternate"]
    interval: int = Field(1, ge=1)

    def build(self) -> Order:
        """Return the order."""
        return Order(partial(_alternating, interval=self.interval))


class Probability(Settings):
    """Each policy by a toss of its own; when all stay, one drawn evenly moves."""

    name: Literal["probability"]
    probability: float = Field(0.5, gt=0.0, le=1.0)

    def build(self) -> Order:
        """Return the order."""
        return Order(partial(_tossed, probability=self.probability))


class Sequential(Settings):
    """One after another in a fresh random order, with HAPPO's factor (2109.11251)."""

    name: Literal["sequential"]

    def build(self) -> Order:
        """Return the order."""
        return SEQUENTIAL


OrderConfig = Annotated[Joint | Alternate | Probability | Sequential, Field(discriminator="name")]


def _alternating(policies: Sequence[str], step: int, seed: int, *, interval: int) -> tuple[str, ...]:
    return (policies[(step - 1) // interval % len(policies)],)


def _tossed(policies: Sequence[str], step: int, seed: int, *, probability: float) -> tuple[str, ...]:
    draw = random.Random(derive_seed(seed, "order", step))
    chosen = tuple(name for name in policies if draw.random() < probability)
    return chosen or (draw.choice(list(policies)),)


def _shuffled(policies: Sequence[str], step: int, seed: int) -> tuple[str, ...]:
    order = list(policies)
    random.Random(derive_seed(seed, "order", step)).shuffle(order)
    return tuple(order)


SEQUENTIAL = Order(_shuffled, sequential=True)


def check_separate_weights(team: Team, algorithm: str) -> None:
    """Raise ConfigError unless every trained agent has weights of its own."""
    for policy in team.trained:
        agents = team.agents_of(policy)
        if len(agents) > 1:
            raise ConfigError(
                f"`{algorithm}` updates policies one after another, so each agent needs its own; '{agents[0]}' and "
                f"'{agents[1]}' both use '{policy}'. Set `team.sharing: lora`, or `algorithm.name: mappo`."
            )
