"""Bad habits of scripted experts: in a stated share of the demonstrations, an agent makes its mistake."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import AfterValidator

from kapelle.errors import need_known


def _shares(flaws: Mapping[str, float]) -> Mapping[str, float]:
    for agent, share in flaws.items():
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"`flaws.{agent}` is {share}; it is a share between 0 and 1.")
    return flaws


Flaws = Annotated[Mapping[str, float], AfterValidator(_shares)]
"""Agent → share of the demonstrations in which its script is flawed, in [0, 1]."""


def check_flaws(flaws: Mapping[str, float], agents: Sequence[str]) -> None:
    """Raise ConfigError when `flaws` names an agent that is not there."""
    for agent in flaws:
        need_known("environment.flaws", "agent", agent, agents)


def flawed(flaws: Mapping[str, float], agent: str, seed: int) -> bool:
    """Return whether this agent's demonstration with this seed is a flawed one."""
    return random.Random(f"{seed}/{agent}").random() < flaws.get(agent, 0.0)
