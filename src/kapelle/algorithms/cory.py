"""CORY: pioneer and observer learn together and exchange roles (2410.06101).

The pioneer answers a question; the observer answers it having read the pioneer's answer (workflow `cory`). Both are
paid r_1 + r_2, and every `swap_every` steps the two policies exchange roles: their weights are swapped, together
with their optimiser state, counters and references. `base` estimates advantages and updates the weights; it may be any
algorithm that learns from rollouts. Without a swap CORY is that algorithm on the sum of rewards.

Critics stay with their roles: they judge what a role reads, whichever weights play it. The phase (which weights play
which role) follows from the number of the step; the checkpoint holds the weights by role.

Deviations from the paper: the paper's base is PPO with a KL penalty (`base: {name: ippo, gae: {kl_in_reward: …}}`);
here it may be anything. Exchange is every `swap_every` optimiser updates in the paper, steps of the loop here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from kapelle.algorithm import Algorithm, algorithm_class
from kapelle.errors import ConfigError
from kapelle.rows import Learners
from kapelle.settings.base import AlgorithmSettings, Plugged, Settings
from kapelle.team import Team


class CORY(Settings):
    """Settings of sequential cooperation with exchange of roles."""

    name: Literal["cory"] = "cory"
    base: Annotated[AlgorithmSettings, Plugged()]
    """Settings of the algorithm that learns; its `team_reward` is `sum`."""
    swap_every: int = Field(default=5, ge=0)
    """Steps between exchanges; 0 never."""

    @field_validator("base", mode="before")
    @classmethod
    def _of_its_class(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        if "name" not in given:
            raise ValueError("`base` needs a `name`, for example `base: {name: grpo}`")
        if given.get("team_reward", "sum") != "sum":
            raise ValueError("CORY pays both agents the sum of their rewards; leave `base.team_reward` out")
        found = algorithm_class(str(given["name"]))
        if "team_reward" not in found.model_fields:  # type: ignore[attr-defined]
            raise ValueError(f"`base: {given['name']}` does not learn from rollouts; set grpo, rloo or ippo")
        return found.model_validate({**given, "team_reward": "sum"})  # type: ignore[attr-defined]

    def build(self) -> Algorithm:
        """Return the base's row with the exchange."""
        row = self.base.build()
        hooks = (Exchange(self.swap_every), *row.after_update) if self.swap_every else row.after_update
        return replace(row, name=self.name, after_update=hooks, checks=(*row.checks, check_pair))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Lets the team's first two policies change places, every so many steps."""

    every: int
    moves_weights: ClassVar[bool] = True

    def __call__(self, step: int, team: Team, engine: Learners) -> None:
        """Exchange them if the step is due."""
        if step % self.every == 0:
            engine.exchange(*team.trained[:2])


def check_pair(team: Team) -> None:
    """Raise ConfigError unless two agents learn, with weights of the same shape that can be swapped."""
    if len(team.names) != 2 or len(team.trained) != 2:
        raise ConfigError(
            f"`cory` exchanges the weights of two agents; this team has {len(team.names)} agents and "
            f"{len(team.trained)} trained policies. Name a pioneer and an observer, with `team.sharing: lora`."
        )
    first, second = (team.policies[name] for name in team.trained)
    if (first.lora, team.bases[first.base]) != (second.lora, team.bases[second.base]):
        raise ConfigError(
            f"`cory` exchanges the weights of '{first.name}' and '{second.name}', which differ in model or `lora`. "
            "Give both the same."
        )
