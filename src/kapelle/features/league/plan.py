"""Determine the policies that a league adds to a run, and check the league before a model is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from kapelle.environment import DrivenByPrograms, HasPlayers, enumerable, offers
from kapelle.errors import ConfigError
from kapelle.features.league.policies import added_policies
from kapelle.features.league.pool import (
    DRAFT,
    EXPLOITER,
    FOLLOWER,
    MAIN,
    PARTNER,
    followers_of,
    partners_of,
)
from kapelle.features.league.settings import FcpPopulation, LeagueConfig, PsroPopulation
from kapelle.functional.ratings import SOLVER_NEEDS, check_packages
from kapelle.models.outline import Outline, adapter_parameters
from kapelle.runs.named_checkpoint import names_a_run, split_run
from kapelle.runs.reader import read_config
from kapelle.settings.checks import RunToCheck
from kapelle.settings.overlays import parse_yaml
from kapelle.settings.schema import RunConfig
from kapelle.settings.weights import PastAdapter
from kapelle.setup.bases import Bases
from kapelle.setup.feature import FeaturePlan
from kapelle.team import Policy
from kapelle.workflows.play import PlayWorkflow


def members(league: LeagueConfig, run: RunToCheck) -> Iterator[str]:
    """Yield a message for each problem of the members in the settings."""
    environment = run.config.environment
    players: dict[str, str] = {}
    for member, weights in league.members.items():
        if member in {MAIN, EXPLOITER} or member.startswith((PARTNER, FOLLOWER, DRAFT)):
            yield (
                f"`league.members.{member}` has the name of a learner of the league (`{MAIN}`, `{EXPLOITER}`, `{PARTNER}…`, "
                f"`{FOLLOWER}…`, `{DRAFT}…`). Rename the member."
            )
        if isinstance(weights, PastAdapter) and names_a_run(weights.past):
            where = f"`league.members.{member}.past: {weights.past}`"
            yield from _other_game(run.config, where, split_run(weights.past)[0])
        if not isinstance(weights, str) or weights == "frozen":
            continue
        where = f"`league.members.{member}: {weights}`"
        if players.setdefault(weights, member) != member:
            yield f"{where} is the same player as `league.members.{players[weights]}`. Remove one of them."
        elif not offers(environment, HasPlayers):
            yield (
                f"{where} is a player of the environment, but `{environment.name}` has none. Use a past self (`{{past: RUN@10}}`), a "
                "model, an endpoint or `frozen`; OpenSpiel games have players."
            )
        else:
            try:
                environment.check_player(weights)
            except ConfigError as error:
                yield f"{where}: {error}"


def _other_game(config: RunConfig, where: str, run: Path) -> Iterator[str]:
    """Yield a message if a past self learned a different game. For mixtures, one game in common is sufficient."""
    read = parse_yaml(read_config(run))
    learned = read.get("environment") if isinstance(read, Mapping) else None
    if not isinstance(learned, Mapping):
        return
    now = config.environment.model_dump(mode="json")
    there, here = (
        " ".join(str(each[key]) for key in ("name", "game") if key in each) for each in (learned, now)
    )
    if there != here and "mixture" not in (learned.get("name"), now.get("name")):
        yield f"{where} learned {there}, but this run plays {here}. Use a run of the same game."


def games(league: LeagueConfig, run: RunToCheck) -> Iterator[str]:
    """Yield the reasons why games against members cannot be played or trained on."""
    config, algorithm, team = run.config, run.algorithm, run.team
    if len(team.names) < 2:
        yield "`league`: the team has one agent, so there is no role for an opponent. Define two agents."
    if not algorithm.collects_episodes:
        yield f"`league`: `{algorithm.name}` collects no episodes. Use an algorithm that does, for example `grpo`."
    if league.enter is None and not league.members and league.population.name != "self_play":
        yield "`league` has no members, and none can enter. Set `league.enter` or `league.members`."
    if team.turns_of:
        yield (
            f"`league`: agents '{', '.join(team.turns_of)}' have weights per turn, but a past self has one adapter. Give them "
            "`weights: lora`."
        )
    if config.training.asynchronous:
        yield "`league`: `training.asynchronous` would continue an episode with other members. Set it to false."
    if offers(config.environment, DrivenByPrograms):
        yield "`league`: external programs choose their agents themselves. Remove `league`."


def population(league: LeagueConfig, run: RunToCheck) -> Iterator[str]:
    """Yield a message for each setting that the population of the league does not support."""
    config, algorithm, team, drawn = run.config, run.algorithm, run.team, league.population
    homes = [name for name in team.names if team.policy(name).trained]
    observes = isinstance(config.workflow, PlayWorkflow) and config.workflow.memory == "observation"
    exact = observes and enumerable(config.environment, len(team.names), league.exact) is not None
    one_slot = league.enter is not None and league.slots == 1 and league.keep > 1
    two_slots = "Set `league.slots` to at least 2."
    if isinstance(drawn, PsroPopulation):
        check_packages(*SOLVER_NEEDS[drawn.by], what=f"`league.population.by: {drawn.by}`")
        if one_slot and not exact:
            yield f"`league`: `psro` plays pairs of members. {two_slots}"
        elif one_slot and len(homes) == 2 == len({team.policy_of[home] for home in homes}):
            yield f"`league`: with `psro` each of two adapters has its own mixture of members. {two_slots}"
        if len(homes) == 1:
            yield (
                "`league`: `psro` compares members in opposite roles, but past selves of a single agent have only its role. Train "
                "several agents, with one shared adapter if they are to be one player."
            )
    elif league.pair_games and one_slot and not exact:
        yield f"`league`: `pair_games` plays pairs of members. {two_slots}"
    if followers_of(league):
        yield from _line(league, run)
    if isinstance(drawn, FcpPopulation):
        if league.enter is None:
            yield (
                "`league`: with `fcp`, partners enter the pool. Set `league.enter`, or use `fictitious` with `league.members`."
            )
        if league.exploiter is not None:
            yield "`league`: `fcp` trains partners but no exploiter. Remove `league.exploiter`."
        if league.leaves == "weakest":
            yield (
                "`league`: partners of `fcp` play no games against members, so the weakest member is unknown. Set `league.leaves` to oldest or thinned."
            )
    if league.exploiter is not None or partners_of(league) or followers_of(league):
        beside = "exploiters, partners and additional `learners`"
        if algorithm.update.order.sequential:
            yield (
                f"`league`: `{algorithm.name}` updates one agent after another, but {beside} are not agents. Remove them, or "
                "use an algorithm that updates all agents at once."
            )
        if algorithm.critic is not None:
            yield (
                f"`league`: `{algorithm.name}` has critics, which would evaluate the turns of {beside} as if they were the agent's. Remove them, "
                "or use an algorithm without critics."
            )


def _line(league: LeagueConfig, run: RunToCheck) -> Iterator[str]:
    learners = followers_of(league) + 1
    if run.config.training.tasks_per_step < learners:
        yield (
            f"`league`: each of the {learners} `learners` needs a task in every step. Set `training.tasks_per_step` to at least "
            f"{learners}."
        )
    if league.enter is None:
        yield "`league`: with several `learners`, past selves must enter the pool. Set `league.enter`."
    if league.slots < league.keep:
        yield (
            "`league`: several `learners` need all past selves in memory. Set `league.slots` to at least `league.keep` "
            f"({league.keep})."
        )
    if league.exploiter is not None:
        yield "`league`: several `learners` cannot be combined with an exploiter. Remove `league.exploiter`."


class LeaguePlan(FeaturePlan[LeagueConfig]):
    """The additional policies and the checks of a league."""

    def policies(
        self, config: RunConfig, learners: Mapping[str, Policy], bases: Bases
    ) -> Mapping[str, Policy]:
        """Return the policies for permanent members, for slots of past selves, and for additional learners."""
        return added_policies(self.settings, config, learners, bases)

    def check(self, run: RunToCheck) -> Iterator[str]:
        """Yield the reasons why a run cannot be trained with this league."""
        for check in (members, games, population):
            yield from check(self.settings, run)

    def check_memory(self, run: RunToCheck, models: Mapping[str, Outline]) -> Iterator[str]:
        """Yield a message if the adapters of past selves and learners do not fit in the machine's memory."""
        league, team = self.settings, run.team
        own = [
            policy
            for name, policy in team.policies.items()
            if policy.lora is not None and name in set(team.policy_of.values())
        ]
        one = 4 * sum(
            adapter_parameters(models[policy.base], policy.lora) for policy in own if policy.lora is not None
        )
        slots = sum(name.startswith("league:") for name in team.policies) // max(1, len(own))
        selves = slots + league.in_memory
        learners = partners_of(league) + followers_of(league) + (league.exploiter is not None)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if (selves + learners) * one > machine:
            more = (
                f", and {learners} additional {'learner' if learners == 1 else 'learners'},"
                if learners
                else ""
            )
            yield (
                f"`league.slots` and `league.in_memory` keep {selves} past selves{more} of {one / 2**30:.1f} GiB each, but this machine has "
                f"{machine / 2**30:.0f} GiB. Lower them, the learners of `league.population`, or `team.lora.rank`."
            )
