"""The section `league` of a recipe, which adds opponents and partners of the learners."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kapelle.settings.base import Settings
from kapelle.settings.feature import FeatureSettings
from kapelle.settings.weights import NAME, EndpointConfig, OwnModel, PastAdapter


class SelfPlayPopulation(Settings):
    """The learners only play against their current selves. Past selves are stored and evaluated, but never drawn as opponents."""

    name: Literal["self_play"] = "self_play"
    share: float = Field(default=0.0, ge=0.0, le=0.0)
    """Share of the tasks in which the learners play against the pool, which is always 0."""


class FictitiousPopulation(Settings):
    """All members are drawn with the same probability. If the members are past selves, this is fictitious self-play."""

    name: Literal["fictitious"] = "fictitious"
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the tasks in which the learners play against the pool. In the other tasks, the learners play against each other."""


class PfspPopulation(Settings):
    """Members that the learner does not yet beat are drawn more often (PFSP of AlphaStar, doi:10.1038/s41586-019-1724-z)."""

    name: Literal["pfsp"] = "pfsp"
    share: float = Field(default=0.65, gt=0.0, le=1.0)
    """Share of the tasks in which the learners play against the pool, as in `fictitious`. AlphaStar's main agents played half of their
    games with PFSP and 35 % against themselves."""
    weight: Literal["hard", "even"] = "hard"
    """Weight of a member that the learner beats with probability x: (1 − x)^`power` for `hard`, and x(1 − x) for `even`."""
    power: float = Field(default=2.0, gt=0.0, allow_inf_nan=False)
    """Exponent of the weight `hard`. With larger values, harder members are drawn more often. With 1, members are drawn in proportion to
    the points that they win."""


class PsroPopulation(Settings):
    """Opponents are sampled from a meta-strategy computed on the payoff table of all members.

    The learner is trained as a best response to this meta-strategy (PSRO, arXiv:1711.00832).
    """

    name: Literal["psro"] = "psro"
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the tasks in which the learners play against the pool, as in `fictitious`."""
    by: Literal["nash", "alpha_rank", "prd", "uniform"] = "nash"
    """The meta-strategy: a Nash equilibrium of the payoff table (`nash`), α-Rank (`alpha_rank`, arXiv:1903.01373), projected replicator
    dynamics (`prd`) or the uniform distribution (`uniform`)."""
    games: int = Field(default=64, ge=2)
    """Number of games that each pair of members plays in each role to estimate the payoff table, if the game is too large to compute
    payoffs exactly."""
    learners: int = Field(default=1, ge=1)
    """Number of learners that are trained at the same time, in a line (pipeline PSRO, arXiv:2006.08555). The first learner is trained as
    a best response to the members. Each later learner is trained as a best response to the members and the learners ahead of it. The
    first learner enters the pool and then moves to the end of the line."""
    refresh: int = Field(default=5, ge=1)
    """Number of steps after which learners in a line meet the current weights of the learners ahead of them, and the payoff table is
    updated for these weights."""


class FcpPopulation(Settings):
    """Several partners are trained first, each by self-play. Afterwards, the learner is trained with all partners.

    This population is fictitious co-play (arXiv:2110.08176), which is intended for cooperative games. Partners enter the pool while
    they learn, so that the learner meets both weak and strong partners.
    """

    name: Literal["fcp"] = "fcp"
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the tasks in which the learners play with the pool, as in `fictitious`."""
    partners: int = Field(default=4, ge=1)
    """Number of partners that learn by self-play, each with separate adapters."""
    alone: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of the run's steps in which the partners learn. In the remaining steps, the learner learns."""
    spread: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Standard deviation of the noise that is added to the matrices B of each partner's adapters at the start. If all adapters start
    equal to their base model, all partners learn the same convention, and the learner never meets a different convention. With noise,
    partners start with different weights, like networks with different random initialisations."""


def _named(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


Population = Annotated[
    Annotated[
        SelfPlayPopulation | FictitiousPopulation | PfspPopulation | PsroPopulation | FcpPopulation,
        Field(discriminator="name"),
    ],
    BeforeValidator(_named),
]


class EnterConfig(Settings):
    """Settings of when the learners enter the pool as a member with their current weights."""

    every: int = Field(default=10, ge=1)
    """Number of steps between two entries. With `beats`, this is the minimum number of steps."""
    beats: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of points (a draw is half a point) that the learner must win against the pool before it enters, tested with `confidence`.
    With null, the learner enters without a test."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Required confidence that the learner wins more than the share `beats` of the points, computed with Wilson's interval over the games
    since the last entry."""
    at_latest: int | None = Field(default=None, ge=1)
    """Number of steps (at least `every`) after which the learner enters even if it has not won the share `beats`. With null, there is no
    limit."""
    restart: bool = False
    """Whether the learner is reset to its initial weights after it has entered, so that each member is a new best response to the earlier
    members, as in PSRO. A restart helps because a policy with low entropy rarely finds different moves."""

    @model_validator(mode="after")
    def _waiting(self) -> EnterConfig:
        if self.at_latest is not None and self.at_latest < self.every:
            raise ValueError(
                f"`at_latest: {self.at_latest}` is less than `every: {self.every}`, the minimum number of steps from one entry to the next. Set "
                "`at_latest` to `every` or more"
            )
        return self


class ExploiterConfig(Settings):
    """Settings of a second learner, whose only opponent is the current first learner (AlphaStar's main exploiter).

    Both the exploiter and the first learner enter the pool.
    """

    share: float = Field(default=0.25, gt=0.0, lt=1.0)
    """Share of the tasks in which the exploiter learns."""
    restart: bool = True
    """Whether the exploiter is reset to its initial weights after each of its entries into the pool."""


MemberConfig = PastAdapter | OwnModel | EndpointConfig | str


class LeagueConfig(FeatureSettings):
    """Settings of a pool of opponents or partners, such as past selves, frozen models, endpoints and players of the environment."""

    plan: ClassVar[str] = "kapelle.features.league.plan:LeaguePlan"
    feature: ClassVar[str] = "kapelle.features.league.league:League"
    population: Population = PfspPopulation()
    """Rule by which members are drawn: `self_play`, `fictitious`, `pfsp` or `psro`, or one of these with settings, or `fcp` with
    settings."""
    members: dict[Annotated[str, Field(pattern=NAME)], MemberConfig] = Field(default={})
    """Permanent members by name. Each member is `frozen` (the base model), `{past: RUN@10}`, `{model: FOLDER}`, `{endpoint: …, model:
    …}`, or a player of the environment such as `nash`, `random` or `mcts(simulations=200)`."""
    enter: EnterConfig | None = EnterConfig()
    """When past selves enter the pool. With null, past selves never enter."""
    start: bool = True
    """Whether the learners' initial weights are the first member of the pool. This setting only has an effect if past selves enter the
    pool."""
    keep: int = Field(default=16, ge=1)
    """Maximum number of past selves in the pool."""
    leaves: Literal["oldest", "weakest", "thinned"] = "thinned"
    """Which past self leaves if there are more than `keep`: the oldest, the weakest (the one that the learner beats most often), or with
    `thinned` the one with the nearest neighbours in time, so that the remaining past selves are spread over the run."""
    slots: int = Field(default=4, ge=1)
    """Maximum number of past selves that are loaded together with the models, and can therefore take part in the games of a step."""
    in_memory: int = Field(default=8, ge=1)
    """Maximum number of past selves whose weights are in main memory, if a run directory can store the weights of the others."""
    forget: float = Field(default=0.9, gt=0.0, le=1.0)
    """Factor by which the weights of earlier games are multiplied in each step, for the win rates that are used to draw members. Old games
    count less because the learner changes."""
    exact: int = Field(default=2000, ge=0)
    """Maximum number of information states of a game for which payoffs and NashConv are computed exactly from the policies. With 0, no
    exact values are computed."""
    pair_games: int = Field(default=0, ge=0)
    """Number of games that each pair of past selves plays when a past self enters, if payoffs are not exact. The games are used for the
    payoff table and the diversity of the pool. With 0, no games are played. The population `psro` has a separate setting `games`."""
    exploiter: ExploiterConfig | None = None
