"""What a program posts when it knows how well its agents did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from kapelle.errors import EpisodeError
from kapelle.rollout.outcomes import in_range, plain
from kapelle.services.http.bodies import Body, read_body
from kapelle.services.http.refusals import wrong
from kapelle.types import Json


class Reward(Body):
    """What the agents of a session have earned."""

    reward: float | None = None
    """Of every agent that spoke."""
    rewards: dict[str, float] = Field(default={}, max_length=1024)
    """Of agents by name, in place of `reward`."""
    success: float | None = Field(default=None, ge=0.0, le=1.0)
    """How well the team as a whole did."""
    info: dict[str, Any] = Field(default={}, max_length=64)
    """What is kept beside it."""

    def by_agent(self, team: Sequence[str]) -> Mapping[str, float]:
        """Return what each agent has earned."""
        shared = {} if self.reward is None else dict.fromkeys(team, self.reward)
        return {**shared, **self.rewards}


def read_reward(
    body: Json, team: Sequence[str], bounds: tuple[float, float] = (-math.inf, math.inf)
) -> Reward:
    """Return a reward; Refusal (400) for one that names nobody, or that an episode could not hold.

    `bounds` are the least and the greatest that an agent may earn.
    """
    reward = read_body(Reward, body)
    if reward.reward is None and not reward.rewards:
        raise wrong("Post `reward`, for all agents that spoke, or `rewards` by agent.", "reward")
    for name in reward.rewards:
        if name not in team:
            raise wrong(
                f"`rewards` names an agent that the team does not have. It has: {', '.join(team)}.", "rewards"
            )
    shared = {} if reward.reward is None else {"reward": reward.reward}
    for place, paid in {
        **shared,
        **{f"rewards.{name}": paid for name, paid in reward.rewards.items()},
    }.items():
        if not in_range(paid, bounds):
            raise wrong(
                f"`{place}` is {paid:g}, and rewards of this run lie in [{bounds[0]:g}, {bounds[1]:g}] "
                "(`environment.rewards` of its recipe). Post one in that range; the session still waits for it.",
                place,
            )
    try:
        plain(reward.info, "info")
    except EpisodeError as error:
        raise wrong(str(error), "info") from None
    return reward
