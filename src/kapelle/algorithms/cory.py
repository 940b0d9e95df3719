"""CORY: a pioneer and an observer learn together and exchange roles (arXiv:2410.06101).

The pioneer answers a question. The observer reads the question and the pioneer's answer, and then gives its own answer
(workflow `cory`). Both agents receive the reward r_1 + r_2. Every `swap_every` steps the two policies exchange roles: their
weights are swapped, together with optimiser states, counters and references. The base algorithm (`base`) computes advantages
and updates the weights; it can be any algorithm that learns from rollouts. Without exchanges, CORY is identical to the base
algorithm with the sum of the rewards.

With `reward: win`, the two agents compete, as in Agon (arXiv:2607.07690): an agent receives 1 if its answer has a higher score
than the answer of the other agent, and 0 otherwise. The observer reads the pioneer's answer first, so the pioneer wins only if
the observer's answer is still worse.

Critics stay with their roles, because they evaluate what a role reads. The step number determines which weights have which
role; the checkpoint stores the weights by role.

Deviations from the paper:

- The paper's base algorithm is PPO with a KL penalty (`base: {name: ippo, gae: {kl_in_reward: …}}`). This implementation
  allows any base algorithm.
- The setting `swap_every` counts steps of the training loop; the paper counts optimiser updates.
- In Agon, the roles of the two policies alternate; with `reward: win`, they are exchanged every `swap_every` steps. Only
  the abstract of Agon was read; that a tie gives both agents a reward of 0 is an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from kapelle.algorithm import Algorithm, algorithm_class
from kapelle.errors import ConfigError
from kapelle.rows import Learners
from kapelle.settings.base import AlgorithmSettings, Plugged, Settings
from kapelle.team import Team


class CORY(Settings):
    """Settings of CORY: sequential cooperation with an exchange of roles."""

    name: Literal["cory"] = "cory"
    reward: Literal["sum", "win"] = "sum"
    """The reward of the agents: the sum of both rewards for each agent (`sum`, CORY), or 1 for the agent with the higher reward
    and 0 for the other agent (`win`, Agon)."""
    base: Annotated[AlgorithmSettings, Plugged()]
    """The settings of the base algorithm, whose `team_reward` is always that of `reward`."""
    swap_every: int = Field(default=5, ge=0)
    """The number of steps between two exchanges of roles. With 0, roles are never exchanged."""

    @field_validator("base", mode="before")
    @classmethod
    def _of_its_class(cls, given: Any, info: ValidationInfo) -> Any:
        reward = info.data.get("reward", "sum")
        if not isinstance(given, Mapping):
            return given
        if "name" not in given:
            raise ValueError("`base` needs a `name`, for example `base: {name: grpo}`")
        if given.get("team_reward", reward) != reward:
            raise ValueError(
                f"CORY shares rewards by `reward: {reward}`; remove `base.team_reward`, or set `reward`"
            )
        found = algorithm_class(str(given["name"]))
        if "team_reward" not in found.model_fields:  # type: ignore[attr-defined]
            raise ValueError(f"`base: {given['name']}` does not learn from rollouts; use grpo, rloo or ippo")
        return found.model_validate({**given, "team_reward": reward})  # type: ignore[attr-defined]

    def build(self) -> Algorithm:
        """Return the base algorithm with a hook that exchanges the roles."""
        row = self.base.build()
        hooks = (Exchange(self.swap_every), *row.after_update) if self.swap_every else row.after_update
        return replace(row, name=self.name, after_update=hooks, checks=(*row.checks, check_pair))


@dataclass(frozen=True, slots=True)
class Exchange:
    """A hook that exchanges the weights of the team's first two trained policies every `every` steps."""

    every: int
    moves_weights: ClassVar[bool] = True

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        """Exchange the weights of the two policies if the step number is a multiple of `every`."""
        if step % self.every == 0:
            engine.exchange(*team.trained[:2])


def check_pair(team: Team) -> None:
    """Raise ConfigError unless the team has two trained agents whose weights have the same shapes."""
    if len(team.names) != 2 or len(team.trained) != 2:
        raise ConfigError(
            f"`cory` exchanges the weights of two agents, but this team has {len(team.names)} agents and "
            f"{len(team.trained)} trained policies. Define a pioneer and an observer, and set `team.sharing: lora`."
        )
    first, second = (team.policies[name] for name in team.trained)
    if (first.lora, team.bases[first.base]) != (second.lora, team.bases[second.base]):
        raise ConfigError(
            f"`cory` exchanges the weights of '{first.name}' and '{second.name}', but their models or `lora` settings "
            "differ. Use the same model and settings for both."
        )
