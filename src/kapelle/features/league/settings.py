"""The section `league` of a recipe: additional opponents and partners of the learners."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from kapelle.settings.base import Settings
from kapelle.settings.feature import FeatureSettings
from kapelle.settings.weights import NAME, EndpointConfig, OwnModel, PastAdapter


class SelfPlayPopulation(Settings):
    """The learners play only their current selves; past selves are kept and measured, but never drawn."""

    name: Literal["self_play"] = "self_play"
    share: float = Field(default=0.0, ge=0.0, le=0.0)
    """Share of the tasks that are played against the pool, which is always 0."""


class FictitiousPopulation(Settings):
    """Every member is drawn equally often; if the members are past selves, this is fictitious play."""

    name: Literal["fictitious"] = "fictitious"
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """Share of the tasks that are played against the pool; in the other tasks, the learners play one another."""


class PfspPopulation(Settings):
    """Members that the learner does not beat yet are drawn more often (AlphaStar's PFSP, 10.1038/s41586-019-1724-z)."""

    name: Literal["pfsp"] = "pfsp"
    share: float = Field(default=0.65, gt=0.0, le=1.0)
    """As in `fictitious`; AlphaStar's main agents played half of their games by PFSP and 35 % against themselves."""
    weight: Literal["hard", "even"] = "hard"
    """Weight of a member that the learner beats with probability x: `hard` is (1 − x)^`power`, `even` is x(1 − x)."""
    power: float = Field(default=2.0, gt=0.0, allow_inf_nan=False)
    """Exponent of `hard`. Larger values draw harder members more often; 1 draws in proportion to the points that they win."""


class PsroPopulation(Settings):
    """Members are drawn by a meta-strategy of the table of all pairs, to which the learner is a best response (PSRO, 1711.00832)."""

    name: Literal["psro"] = "psro"
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """As in `fictitious`."""
    by: Literal["nash", "alpha_rank", "prd", "uniform"] = "nash"
    """The meta-strategy: a Nash equilibrium of the table, α-Rank (1903.01373), projected replicator dynamics, or uniform."""
    games: int = Field(default=64, ge=2)
    """Number of games that each pair plays in each role for the table, if the game is too large to compute payoffs exactly."""
    learners: int = Field(default=1, ge=1)
    """Number of learners that learn at once, in a line (pipeline PSRO, 2006.08555). The first responds to the members, and each later
    one to the members and the learners ahead of it. The first learner enters, and goes to the end of the line."""
    refresh: int = Field(default=5, ge=1)
    """Number of steps after which learners of a line meet the current weights of those ahead of them, and the table is filled for these."""


class FcpPopulation(Settings):
    """Partners are trained first, each by self-play; then the learner is trained with all of them (fictitious co-play, 2110.08176).

    Use it for cooperative games. Partners enter the pool while they learn, so that the learner meets both weak and strong partners.
    """

    name: Literal["fcp"] = "fcp"
    share: float = Field(default=1.0, gt=0.0, le=1.0)
    """As in `fictitious`."""
    partners: int = Field(default=4, ge=1)
    """Number of partners that learn by self-play, each with its own adapters."""
    alone: float = Field(default=0.5, gt=0.0, lt=1.0)
    """Share of the run's steps in which the partners learn; in the other steps the learner learns."""
    spread: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    """Standard deviation of the noise on the matrices B of each partner's adapters at the start. If all adapters start equal to
    their base, they settle on one convention, and the learner never meets another. With a spread, partners start at different
    points, like networks with different random weights."""


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
    """When the learners, with their current weights, enter the pool as a member."""

    every: int = Field(default=10, ge=1)
    """Number of steps from one entry to the next; with `beats`, the minimum number."""
    beats: float | None = Field(default=None, gt=0.0, lt=1.0)
    """Share of points (a draw is half a point) that the learner must win against the pool, tested with `confidence`;
    null lets it enter without a test."""
    confidence: float = Field(default=0.95, ge=0.5, lt=1.0)
    """Required confidence that the learner wins more than `beats`, by Wilson's interval over the games since the last entry."""
    at_latest: int | None = Field(default=None, ge=1)
    """Number of steps, at least `every`, after which it enters even if it has not beaten the pool; null sets no limit."""
    restart: bool = False
    """Whether the learner then restarts from its initial weights, so that each member is a new best response to the earlier ones, as in
    PSRO. A policy of low entropy rarely finds different moves."""

    @model_validator(mode="after")
    def _waiting(self) -> EnterConfig:
        if self.at_latest is not None and self.at_latest < self.every:
            raise ValueError(
                f"`at_latest: {self.at_latest}` is less than `every: {self.every}`, the minimum number of steps from one entry to the next. Set "
                "`at_latest` to `every` or more"
            )
        return self


class ExploiterConfig(Settings):
    """A second learner, whose only opponent is the current first learner; both enter the pool (AlphaStar's main exploiter)."""

    share: float = Field(default=0.25, gt=0.0, lt=1.0)
    """Share of the tasks in which it learns."""
    restart: bool = True
    """Whether it restarts from its initial weights after each of its entries."""


MemberConfig = PastAdapter | OwnModel | EndpointConfig | str


class LeagueConfig(FeatureSettings):
    """A pool of opponents or partners (past selves, frozen models, endpoints, players of the environment), and how it grows."""

    plan: ClassVar[str] = "kapelle.features.league.plan:LeaguePlan"
    feature: ClassVar[str] = "kapelle.features.league.league:League"
    population: Population = PfspPopulation()
    """Rule by which members are drawn: `self_play`, `fictitious`, `pfsp`, `psro`, or one of these with its settings; or `fcp`
    with its settings."""
    members: dict[Annotated[str, Field(pattern=NAME)], MemberConfig] = Field(default={})
    """Permanent members, by name: `frozen` (the base), `{past: RUN@10}`, `{model: FOLDER}`, `{endpoint: …, model: …}`, or a
    player of the environment such as `nash`, `random` or `mcts(simulations=200)`."""
    enter: EnterConfig | None = EnterConfig()
    """When past selves enter; null means never."""
    start: bool = True
    """Whether the learners' initial weights are the first member; only if past selves enter."""
    keep: int = Field(default=16, ge=1)
    """Maximum number of past selves in the pool."""
    leaves: Literal["oldest", "weakest", "thinned"] = "thinned"
    """Which past self leaves if there are more: the oldest, the one that the learner beats most often, or the one with the nearest
    neighbours in time, so that the remaining ones are spread over the run."""
    slots: int = Field(default=4, ge=1)
    """Maximum number of past selves that are loaded with the models, and so can take part in one step's games."""
    in_memory: int = Field(default=8, ge=1)
    """Maximum number of past selves whose weights are in main memory, if a run directory can hold the others."""
    forget: float = Field(default=0.9, gt=0.0, le=1.0)
    """Factor per step on the weight of earlier games in the win rates used to draw members, because the learner changes."""
    exact: int = Field(default=2000, ge=0)
    """Maximum information states of a game whose payoffs and NashConv are computed exactly from the policies; 0 computes none."""
    pair_games: int = Field(default=0, ge=0)
    """Number of games that each pair of past selves plays when one enters, for the table of payoffs and the pool's diversity, if payoffs
    are not exact; 0 plays none. `psro` has its own `games`."""
    exploiter: ExploiterConfig | None = None
