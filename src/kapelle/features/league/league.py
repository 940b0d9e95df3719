"""Run a league during training: load past selves, count the results of games, add members, and compute exact values of small games.

Slots are policies of the team map that belong to no agent and are not trained. The members in these slots change from step to step. A
learner can therefore play against many opponents in one batch, and `league.slots` limits the memory. The weights of other members are
in main memory or in the folder `league` of the run.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kapelle.algorithms.signals.samples import policy_sample
from kapelle.environment import Enumerable, enumerable
from kapelle.errors import ConfigError, EpisodeError
from kapelle.features.league.assignment import (
    Assignments,
    Chances,
    Follower,
    OpponentEntry,
    chances,
    met_in,
    sampled_for_slots,
)
from kapelle.features.league.policies import added_learners, fixed_members, slot_name
from kapelle.features.league.pool import (
    EXPLOITER,
    FOLLOWER,
    MAIN,
    PARTNER,
    LeagueMember,
    MemberPool,
    dependence,
)
from kapelle.features.league.settings import FcpPopulation, LeagueConfig, PsroPopulation
from kapelle.functional.ratings import (
    can_measure_diversity,
    effective_diversity,
    effective_number,
    linked,
    meta_strategy,
    ratings,
)
from kapelle.models.adapters import named
from kapelle.models.lora_bank import layers_of
from kapelle.models.weights import read_adapter, save_adapter
from kapelle.rollout.episodes import shared_rollout
from kapelle.rollout.evaluation.exploitability import (
    TabularPolicies,
    average,
    check_tabular,
    evaluate_table,
    language_table,
)
from kapelle.rollout.setup import RolloutSetup
from kapelle.rows import Column, Sample, turns_of
from kapelle.runs.named_checkpoint import policy_folder
from kapelle.runtime.files import replace_file
from kapelle.runtime.randomness import capture_random, derive_seed, restore_random
from kapelle.runtime.ranks import Ranks
from kapelle.runtime.tensors import copy_together
from kapelle.training.feature import Feature, StartedRun, StepInProgress
from kapelle.types import Cast, Group

Weights = Mapping[str, Mapping[str, Tensor]]
"""Mapping from each policy to its weights by tensor name."""
Load = Callable[[str, Mapping[str, Tensor], int], None]
"""Function that loads the weights of a policy with a version into a sampler."""
Save = Callable[[Path, str, Mapping[str, Tensor]], None]
"""Function that writes the adapter of a policy to a PEFT folder."""
SMALL = 1e-12
"""Value that is added to the weights of a mixture. Without it, the mixture would be undefined if the meta-strategy drew only members that
are not tabular policies."""
START = "start"
"""Name of the snapshot of all learners at the start of the run, for learners that restart."""
COMPARED = 16
"""Number of turns of each member whose log-probs are compared with those of the train engine in each step."""


def _save(run: StartedRun, folder: Path, policy: str, weights: Mapping[str, Tensor]) -> None:
    own = run.team.policies[policy]
    assert own.lora is not None, "a member of a league is an adapter"
    model = run.models[own.base]
    save_adapter(
        folder, weights, named(layers_of(model.model), own.lora), model.name, run.base_hashes[own.base]
    )


class SnapshotStore:
    """A store for the weights of snapshots.

    The most recently used snapshots are in memory. If there is a folder, all snapshots are stored in it.
    """

    def __init__(self, folder: Path | None, most: int, ranks: Ranks, save: Save) -> None:
        """Keep at most `most` snapshots in memory if there is a folder.

        All `ranks` must be able to read this folder, and rank 0 writes to it.
        """
        self._folder, self._most, self._ranks, self._save = folder, most, ranks, save
        self._held: dict[str, Weights] = {}
        """Snapshots in memory, ordered by use, with the most recently used snapshot last."""

    def put(self, name: str, weights: Weights) -> None:
        """Store copies of the weights of a snapshot. All ranks call this method with equal weights."""
        copies = {policy: copy_together(own) for policy, own in weights.items()}
        self._hold(name, copies)

        def write() -> bytes:
            assert self._folder is not None
            if self._ranks.rank == 0:
                for policy, own in copies.items():
                    self._save(policy_folder(self._folder / name, policy), policy, own)
            return b""

        if self._folder is not None:
            self._ranks.all_gather("league", write)

    def note(self, name: str, standing: Mapping[str, Any]) -> None:
        """Write the state of the pool to the folder of a snapshot, for users and the viewer."""
        if self._folder is not None and self._ranks.rank == 0:
            replace_file(self._folder / name / "standing.json", json.dumps(standing, indent=1).encode())

    def of(self, name: str, policies: Iterable[str]) -> Weights:
        """Return the weights of these policies in a snapshot."""
        if name not in self._held:
            assert self._folder is not None, f"the weights of '{name}' are neither in memory nor in a folder"
            place = self._folder / name
            self._hold(name, {each: read_adapter(policy_folder(place, each))[0] for each in policies})
        else:
            self._hold(name, self._held.pop(name))
        return self._held[name]

    def _hold(self, name: str, weights: Weights) -> None:
        self._held.pop(name, None)
        self._held[name] = weights
        while self._folder is not None and len(self._held) > self._most:
            del self._held[next(iter(self._held))]

    @property
    def kept(self) -> list[str]:
        """Names of the snapshots in the folder. A killed process may have left snapshots that belong to no member."""
        return [] if self._folder is None else sorted(each.name for each in self._folder.glob("*@*"))

    def forget(self, name: str) -> None:
        """Delete a snapshot that no checkpoint needs."""
        self._held.pop(name, None)
        if self._folder is not None and self._ranks.rank == 0:
            shutil.rmtree(self._folder / name, ignore_errors=True)


@dataclass(slots=True)
class SlotHolder:
    """A sampler with members of the league in its slots."""

    load: Load
    holds: dict[int, str] = field(default_factory=dict)
    """Mapping from each slot to the name of its member."""


class League(Feature):
    """Assigns roles to members before each step, and measures their strength from the games of the step."""

    def __init__(self, settings: LeagueConfig, run: StartedRun) -> None:
        """Store weights in the folder `league` of the run directory.

        Raises ConfigError if pairs of members must play games but the rollout workers do not support this.
        """
        config, setup, engine = run.config, run.setup, run.engine
        self._settings, self._seed, self._steps = settings, config.seed, config.training.steps
        self._setup, self._engine = setup, engine
        self.players_of_steps = [SlotHolder(player.load) for player in run.players]
        folder = None if run.run_dir is None else run.run_dir / "league"
        team = setup.team
        self._homes = tuple(name for name in team.names if team.policy(name).trained)
        self.learners: dict[str, dict[str, str]] = {
            MAIN: {team.policy_of[agent]: team.policy_of[agent] for agent in self._homes}
        }
        """Mapping from each learner to a mapping from policies of the team map to the learner's policies that replace them."""
        own = tuple(self.learners[MAIN])
        self.learners |= {
            learner: {policy: named(policy) for policy in own}
            for learner, named in added_learners(self._settings).items()
        }
        self.line = [name for name in self.learners if name == MAIN or name.startswith(FOLLOWER)]
        """The learners in a line, starting with the next learner to enter the pool. Each learner meets the members and the drafts of the
        learners ahead of it."""
        self._spread()
        self.pool = MemberPool(self._settings, fixed_members(self._settings, team))
        self._players = {member.player: member.name for member in self.pool.members if member.player}
        self.snapshots = SnapshotStore(folder, self._settings.in_memory, setup.ranks, partial(_save, run))
        self._kept = folder is not None
        self.in_slot: dict[int, str] = {}
        self.tables: dict[str, TabularPolicies] = {}
        self.strategies: dict[tuple[str, ...], Mapping[str, Chances]] = {}
        """Mapping from the current members to the meta-strategy of their payoff table, by learning agent."""
        self._begun = False
        self.restarted = False
        """Whether a learner was reset after the last step, so that samples that were collected ahead have outdated weights."""
        self._step = 0
        """Number of the last step whose games were counted."""
        self._exact = _tabulated(setup, self._settings.exact)

    def _spread(self) -> None:
        """Make partners start with different weights by adding noise to the matrices B of their adapters (`population.spread`)."""
        population = self._settings.population
        if not isinstance(population, FcpPopulation) or not population.spread:
            return
        for partner in (own for learner, own in self.learners.items() if learner.startswith(PARTNER)):
            for policy in partner.values():
                drawn = torch.Generator().manual_seed(derive_seed(self._seed, "spread", policy))
                moved = {
                    key: own + population.spread * torch.randn(own.shape, generator=drawn).to(own)
                    if key.endswith("lora_B.weight")
                    else own
                    for key, own in self._engine.weights(policy).items()
                }
                self._engine.load_weights(policy, moved)

    # -------- The phases of a step

    def before_rollouts(self, step: StepInProgress) -> None:
        """Assign roles to members in the tasks of the steps that will be collected next."""
        assignments = self.assignments(step.number)
        step.tasks.assign = lambda number, count: assignments.casts(self._seed, number, count)

    def after_rollouts(self, step: StepInProgress) -> None:
        """Compare the log-probs of members' turns with those of the train engine.

        Without this check, incorrect weights of a member would not be noticed.
        """
        gaps = self._engine.check_parity(self.parity_samples(step.groups, COMPARED))
        step.metrics |= {"league/parity": gaps["parity/max"]} if gaps else {}

    def after_update(self, step: StepInProgress) -> None:
        """Count the results of games, and add learners to the pool."""
        step.metrics |= self.learn(step.number, step.groups)
        step.restarted = step.restarted or self.restarted

    # -------- Before a step

    def assignments(self, number: int) -> Assignments:
        """Load members into the slots, and return how roles are assigned in the next steps, starting with step `number`."""
        if not self._begun:
            self._begin()
        if not self._kept:  # without a run directory, no checkpoint needs them
            self.pruned(())
        drawn: list[Mapping[str, Chances]] = [
            {home: self.chances(home, level) for home in self._homes} for level in range(len(self.line))
        ]
        if len(self.line) == 1:
            drawn = [self.thinned(drawn[0], number)]
        met = {
            name for each in drawn for own in each.values() for name, chance in own.items() if chance > 0.0
        }
        names = [each.name for each in self._everybody if each.kind == "past" and each.name in met]
        self.load_members(names, self.players_of_steps)
        entries: dict[str, tuple[OpponentEntry, ...]] = {}
        for level, (learner, each) in enumerate(zip(self.line, drawn, strict=True)):
            found = []
            for member in self.pool.before(level):
                chance = {home: own.get(member.name, 0.0) for home, own in each.items()}
                if any(chance.values()):
                    found.append(OpponentEntry(member.name, chance, self._policies(member), member.player))
            entries[learner] = tuple(found)
        exploiter = self._settings.exploiter
        return Assignments(
            self._homes,
            entries[MAIN],
            self._settings.population.share,
            self._setup.team.names,
            self._own_roles(EXPLOITER) if exploiter else {},
            exploiter.share if exploiter else 0.0,
            tuple(self._own_roles(learner) for learner in self.learners if learner.startswith(PARTNER)),
            self._partners_until,
            tuple(
                Follower(learner, self._own_roles(learner), entries[learner])
                for learner in self.learners
                if learner.startswith(FOLLOWER)
            ),
        )

    @property
    def _everybody(self) -> list[LeagueMember]:
        """All members of the pool and all drafts."""
        return self.pool.before(len(self.line))

    def thinned(self, drawn: Mapping[str, Chances], number: int) -> Mapping[str, Chances]:
        """Return, for each learning agent, the probabilities of the members that will be loaded into the slots; see `sampled_for_slots`.

        Agents with different probabilities share the slots equally.
        """
        past, slots = [member.name for member in self.pool.past], self._settings.slots
        if sum(any(own.get(name, 0.0) > 0.0 for own in drawn.values()) for name in past) <= slots:
            return drawn
        alike = all(own == drawn[self._homes[0]] for own in drawn.values())
        room, seed = slots if alike else slots // len(drawn), derive_seed(self._seed, "seated", number)
        return {home: sampled_for_slots(own, past, room, seed) for home, own in drawn.items()}

    def _own_roles(self, learner: str) -> dict[str, str]:
        """Return a mapping from each learning agent to the policy of the learner in its role."""
        own = self.learners[learner]
        return {agent: own[self._setup.team.policy_of[agent]] for agent in self._homes}

    @property
    def _partners_until(self) -> int:
        population = self._settings.population
        return int(population.alone * self._steps) if isinstance(population, FcpPopulation) else 0

    def _enters(self, learner: str, number: int) -> bool:
        """Return whether a learner enters the pool after this step.

        In fictitious co-play, only partners enter, and only while they learn.
        """
        if isinstance(self._settings.population, FcpPopulation) and not (
            learner.startswith(PARTNER) and number <= self._partners_until
        ):
            return False
        return learner not in self.line[1:] and self.pool.may_enter(learner, number)

    def _begin(self) -> None:
        """Store a snapshot of the learners at the start of the run, and add it to the pool as the first member."""
        self.snapshots.put(START, self._weights_now(*self.learners))
        # It is already a member if a game for the table failed earlier.
        if self._settings.enter is not None and self._settings.start and not self.pool.past:
            self._enter(MAIN, 0)
        self._redraft(0)
        self._begun = True

    def chances(self, home: str, level: int = 0) -> Chances:
        """Return the probabilities with which the agent `home` meets the members and the drafts ahead of a level."""
        return chances(self._settings, self.pool, MAIN, self._strategy(level).get(home))

    def load_members(self, names: Sequence[str], players: Iterable[SlotHolder] = ()) -> None:
        """Load the snapshots of these members into the slots of the train engine and of all samplers, in the given order."""
        for slot, name in enumerate(names):
            if self.in_slot.get(slot) != name:
                for policy, weights in self.snapshots.of(name, self.learners[MAIN]).items():
                    loaded = slot_name(slot, policy)
                    self._engine.load_weights(loaded, self._placed(loaded, weights))
                self.in_slot[slot] = name
            for player in players:
                if player.holds.get(slot) != name:
                    serial = next(member.serial for member in self._everybody if member.name == name)
                    for policy in self.learners[MAIN]:
                        loaded = slot_name(slot, policy)
                        player.load(loaded, self._engine.weights(loaded), serial)
                    player.holds[slot] = name

    def _policies(self, member: LeagueMember) -> dict[str, str]:
        """Return a mapping from each agent to the policy that takes its role for a loaded member."""
        team = self._setup.team
        if member.kind != "past":
            return dict(member.policies)
        slot = next(slot for slot, name in self.in_slot.items() if name == member.name)
        return {
            agent: slot_name(slot, team.policy_of[agent]) if agent in self._homes else team.policy_of[agent]
            for agent in team.names
        }

    # -------- After a step

    def parity_samples(self, groups: Sequence[Group], most: int) -> list[Sample]:
        """Return up to `most` turns of each member's policy, with the log-probs under which they were sampled.

        Turns of members that are no longer loaded are excluded, as are turns of endpoints, which return no log-probs.
        """
        team = self._setup.team
        by_slot = {
            slot_name(slot, own): member
            for slot, member in self.in_slot.items()
            for own in self.learners[MAIN]
        }
        chosen: dict[str, list[Sample]] = {}
        for group in groups:
            for _, turn in turns_of([group], trained_only=False):
                cast = group.task.cast.get(turn.agent)
                if turn.trained or cast is None or not turn.logprobs or turn.policy != cast.policy:
                    continue
                policy = team.policies[turn.policy]
                own = chosen.setdefault(policy.name, [])
                loaded = by_slot.get(policy.name, cast.player)
                if policy.endpoint is None and loaded == cast.player and len(own) < most:
                    columns: dict[str, Tensor] = {Column.BEHAVIOUR: torch.tensor(turn.logprobs)}
                    own.append(policy_sample(turn, team, policy.name, columns))
        return [sample for own in chosen.values() for sample in own]

    def learn(self, number: int, groups: Sequence[Group]) -> dict[str, float]:
        """Count the games of step `number`, add learners to the pool, and return metrics.

        This method is called after the update of the step.
        """
        self._step, self.restarted = number, False
        self.pool.fade()
        team, invalid, turns = self._setup.team, 0.0, 0
        earned: dict[str, list[float]] = {}
        among_selves: list[float] = []
        alike, rewarded = True, False
        for group in groups:
            met = met_in(group.task.cast, team.names, self._homes)
            ahead = []
            for episode in group.valid:
                totals = [episode.total(agent) for agent in team.names]
                alike = alike and math.isclose(min(totals), max(totals), abs_tol=SMALL)
                rewarded = rewarded or any(totals)  # in a zero-sum game, only draws have equal returns
                if isinstance(made := episode.info.get("invalid"), Mapping):
                    own = [agent for agent in made if any(turn.trained for turn in episode.by(agent))]
                    invalid += sum(float(made[agent]) for agent in own)
                    turns += sum(len(episode.by(agent)) for agent in own)
                if met is None:
                    if not group.task.cast:  # in fictitious co-play, partners have assigned roles
                        among_selves.append(fmean(totals))
                    continue
                own_return = episode.total(met.home)
                rest = fmean(episode.total(agent) for agent in team.names if agent != met.home)
                ahead.append(own_return - rest)
                earned.setdefault(met.learner, []).append(own_return)
            if met is not None and ahead:
                member = met.opponent if met.speaks else self._players[met.opponent]
                self.pool.played(met.learner, member, ahead)
        row = {f"league/return/{learner}": fmean(values) for learner, values in earned.items()}
        row |= {
            f"league/points/{name}": self.pool.scores[MAIN, name].points
            for name in self.pool.names
            if (MAIN, name) in self.pool.scores
        }
        if turns:
            row["league/invalid"] = invalid / turns
        if alike and rewarded and among_selves and MAIN in earned:
            row["league/cross_play_gap"] = fmean(among_selves) - fmean(earned[MAIN])
        entered = [learner for learner in self.learners if self._enters(learner, number)]
        for learner in entered:
            row |= self._enter(learner, number)
        population = self._settings.population
        if isinstance(population, PsroPopulation) and (entered or number % population.refresh == 0):
            self._redraft(number)
        mean = [
            fmean(each) for each in zip(*(self.chances(home).values() for home in self._homes), strict=True)
        ]
        row |= {"league/members": float(len(self.pool.members))}
        if mean:
            row["league/effective_members"] = effective_number(mean)
        return row

    def _enter(self, learner: str, number: int) -> dict[str, float]:
        """Add a learner to the pool, and return metrics of the new pool."""
        member, former = self.pool.enter(learner, number)
        self._take_snapshot(member, learner)
        if former is not None:
            self.tables.pop(former.name, None)
        row = {}
        if tabled := self._paired:
            self._fill_payoffs(tabled)
            table = self._payoff_table(tabled)
            if can_measure_diversity():
                row["league/diversity"] = effective_diversity((table - table.T) / 2)
        if learner in self.line:
            self.pool.since |= dict.fromkeys(self.line, number)
            row |= self.measured()
        rated = self._ratings()
        if learner in self.line and member.name in rated:
            row |= zip(
                ("league/rating", "league/rating_low", "league/rating_high"), rated[member.name], strict=True
            )
        self.snapshots.note(member.name, self._standing(member.name, number, rated))
        if number:
            self._restart(learner, last=number == self._steps)
        return row

    def _take_snapshot(self, member: LeagueMember, learner: str) -> None:
        """Store the weights of a learner for a member, keyed by the policies that the member can replace."""
        self.pool.gone.pop(member.name, None)  # a failed step may have left weights of this name
        own = self.learners[learner]
        self.snapshots.put(member.name, {policy: self._engine.weights(mine) for policy, mine in own.items()})

    def _restart(self, learner: str, *, last: bool) -> None:
        """Move a learner that has entered the pool to the end of its line, and restore its initial weights if the settings require it.

        After the last step (`last`), the learner keeps its current weights, because they are the result of the run.
        """
        if learner in self.line:
            self.line.remove(learner)
            self.line.append(learner)
        settings = self._settings.exploiter if learner == EXPLOITER else self._settings.enter
        if settings is not None and settings.restart and not (last and learner in self.line):
            self.restarted = True
            start = self.snapshots.of(START, self._weights_now(*self.learners))
            for mine in self.learners[learner].values():
                self._engine.load_weights(mine, self._placed(mine, start[mine]))

    def _redraft(self, number: int) -> None:
        """Create new drafts of all learners in the line except the last one, and complete the payoff table for later learners."""
        if len(self.line) == 1:
            return
        for draft in self.pool.drafts:
            self.tables.pop(draft.name, None)
        for draft, learner in zip(self.pool.redraft(self.line[:-1], number), self.line, strict=False):
            self._take_snapshot(draft, learner)
        self._fill_payoffs(self._everybody)

    def pruned(self, steps: Collection[int]) -> None:
        """Delete the weights of former members that no checkpoint needs.

        Without checkpoints, the weights of all former members are deleted.
        """
        last = max(steps, default=math.inf)
        for name, (taken, left) in list(self.pool.gone.items()):
            if left <= last and not any(taken <= step < left for step in steps):
                del self.pool.gone[name]
                self.snapshots.forget(name)

    def _placed(self, policy: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: weights[key].to(own.device) for key, own in self._engine.weights(policy).items()}

    # -------- The table of all pairs, and values computed from it

    def _fill_payoffs(self, members: Sequence[LeagueMember]) -> None:
        """Compute the missing entries of these members' payoff table, or estimate them from games."""
        for home in self._homes:
            for one in members:
                for other in members:
                    key = home, one.name, other.name
                    if key not in self.pool.payoffs:
                        self.pool.payoffs[key], self.pool.payoff_games[key] = self._mean_return(
                            home, one, other
                        )

    def _mean_return(self, home: str, one: LeagueMember, other: LeagueMember) -> tuple[float, int]:
        """Return the mean return of one member in an agent's role, with another member in all other roles, and the number of games.

        If the value is exact, the number of games is 0.
        """
        team = self._setup.team
        if self._exact is not None and "past" == one.kind == other.kind:
            table, rest = self.table(one), self.table(other)
            role = team.names.index(home)
            joint = {
                decision.key: (table if decision.player == role else rest).chances[decision.key]
                for decision in self._exact.decisions()
            }
            return self._exact.exact_values(joint)[0][role], 0
        past = [each.name for each in (one, other) if each.kind == "past"]
        self.load_members(list(dict.fromkeys(past)), self.players_of_steps[:1])
        owned = {agent: one if agent == home else other for agent in team.names}
        cast = {
            agent: Cast(self._policies(each).get(agent, ""), each.player or each.name)
            for agent, each in owned.items()
        }
        population = self._settings.population
        games = population.games if isinstance(population, PsroPopulation) else self._settings.pair_games
        # Every pair has the same deals.
        tasks = [
            replace(
                self._setup.environment.task("train", derive_seed(self._seed, "table", k) >> 16), cast=cast
            )
            for k in range(games)
        ]
        drawn = capture_random()
        groups = shared_rollout(self._setup, tasks, 1, derive_seed(self._seed, "table"))
        restore_random(drawn)
        found = [episode.total(home) for group in groups for episode in group.valid]
        if not found:
            reason = next(
                (episode.error for group in groups for episode in group.episodes if episode.error), ""
            )
            raise EpisodeError(
                f"All games of '{one.name}' against '{other.name}' failed. The reason: {reason}"
            )
        return fmean(found), len(found)

    def _strategy(self, level: int = 0) -> Mapping[str, Chances]:
        """Return the meta-strategy of the opponents of each learning agent. The result is empty if there is no payoff table.

        A learner with `level` learners ahead of it also meets the drafts of these learners.
        """
        own = tuple(member.name for member in self.pool.before(level))
        if own not in self.strategies:
            every = {tuple(each.name for each in self.pool.before(k)) for k in range(len(self.line))}
            self.strategies = {names: old for names, old in self.strategies.items() if names in every}
            self.strategies[own] = self._strategy_of(self.pool.before(level))
        return self.strategies[own]

    def _strategy_of(self, members: Sequence[LeagueMember]) -> Mapping[str, Chances]:
        population = self._settings.population
        if not isinstance(population, PsroPopulation) or not members:
            return {}
        self._fill_payoffs(members)
        names, homes = [member.name for member in members], self._homes
        if len(homes) == len({self._setup.team.policy_of[home] for home in homes}) == 2:
            # Rows are members in the first agent's role, columns members in the second's.
            first, second = (np.array(self._payoffs(home, names)) for home in homes)
            one, other = meta_strategy([first, second.T], population.by)
            return dict(zip(homes, (_by_name(names, other), _by_name(names, one)), strict=True))
        table = self._payoff_table(members)
        _, shared = meta_strategy([table, table.T], population.by)
        return dict.fromkeys(homes, _by_name(names, shared))

    def _payoffs(self, home: str, names: Sequence[str]) -> list[list[float]]:
        """Return the payoff matrix of an agent, with its payoffs as each member (rows) against each member (columns)."""
        return [[self.pool.payoffs[home, one, other] for other in names] for one in names]

    def _payoff_table(self, members: Sequence[LeagueMember]) -> NDArray[np.float64]:
        """Return the payoff matrix of members (rows) against members (columns), averaged over the roles of the learning agents."""
        names = [member.name for member in members]
        table: NDArray[np.float64] = np.array([self._payoffs(home, names) for home in self._homes]).mean(
            axis=0
        )
        return table

    @property
    def has_pair_games(self) -> bool:
        """Whether pairs of members play games for the payoff table, because not all payoffs can be computed exactly."""
        if isinstance(self._settings.population, PsroPopulation):
            return self._exact is None or bool(self._settings.members)
        return self._exact is None and self._settings.pair_games > 0

    @property
    def _paired(self) -> list[LeagueMember]:
        """The members in the payoff table.

        With `psro`, these are all members; otherwise, they are the past selves if payoffs are exact or `pair_games` are played.
        """
        if isinstance(self._settings.population, PsroPopulation):
            return self.pool.members
        paired = self._exact is not None or self._settings.pair_games > 0
        # Past selves of a single learning agent have only its role, and never meet.
        return self.pool.past if paired and len(self._homes) > 1 else []

    def _ratings(self) -> dict[str, tuple[float, float, float]]:
        """Return the ratings of the members with their 95 % confidence intervals.

        The rating 0 is assigned to the first member that is connected to the newest member by games. The games of one task are
        dependent, so each of them is counted as a fraction of an independent game.
        """
        known = self.pool.names
        places = {member: place for place, member in enumerate(known)}
        results: dict[tuple[int, int], tuple[float, float, float]] = {}
        weight = 1.0 / dependence(self.pool.met.values())
        for (entrant, member), score in self.pool.met.items():
            if entrant in places and member in places and entrant != member:
                one, other = places[entrant], places[member]
                counts = (score.wins * weight, score.draws * weight, score.losses * weight)
                results[min(one, other), max(one, other)] = counts if one < other else counts[::-1]
        own = next((group for group in linked(len(known), results) if len(known) - 1 in group), [])
        if len(own) < 2:
            return {}
        return {known[k]: rating for k, rating in ratings(own, results, zero=min(own)).items()}

    def _standing(
        self, member: str, step: int, rated: Mapping[str, tuple[float, float, float]]
    ) -> dict[str, Any]:
        """Return the pool with its ratings and results, for the file `standing.json`."""
        payoffs = None
        if tabled := self._paired:
            names = [each.name for each in tabled]
            games = [
                [sum(self.pool.payoff_games[home, one, other] for home in self._homes) for other in names]
                for one in names
            ]
            payoffs = {"names": names, "table": self._payoff_table(tabled).tolist(), "games": games}
        return {
            "step": step,
            "member": member,
            "members": [
                {"name": each.name, "kind": each.kind, "step": each.step} for each in self.pool.members
            ],
            "ratings": {name: list(rating) for name, rating in rated.items()},
            "payoffs": payoffs,
            "results": [
                [entrant, other, round(score.wins), round(score.draws), round(score.losses)]
                for (entrant, other), score in self.pool.met.items()
            ],
            "strategy": {home: dict(self.chances(home)) for home in self._homes},
        }

    # -------- Exact values of small games

    def table(self, member: LeagueMember) -> TabularPolicies:
        """Return the exact action probabilities of a member as tabular policies. Each member is evaluated only once."""
        if member.name not in self.tables:
            self.load_members([member.name])
            team = self._setup.team
            owned = {**team.policy_of, **self._policies(member)}
            self.tables[member.name] = language_table(
                replace(self._setup, team=replace(team, policy_of=owned)), self._engine.score
            )
        return self.tables[member.name]

    def measured(self) -> dict[str, float]:
        """Return NashConv of the newest snapshot and of the mixture of the pool, if the game is small enough."""
        past = self.pool.past
        if self._exact is None or not past:
            return {}
        newest = evaluate_table(self._setup.environment, self.table(past[-1]))
        row = {"league/nash_conv": newest.nash_conv, "league/legal": newest.legal}
        game = self._setup.environment
        tables = [self.table(member) for member in past]
        mixed = average(game, tables)
        if strategies := self._strategy():
            # Each role is mixed according to the strategy to which its opponents respond.
            roles = {
                self._setup.team.names.index(agent): next((o for o in self._homes if o != agent), agent)
                for agent in self._homes
            }
            by_role = {
                role: average(game, tables, [strategies[other][member.name] + SMALL for member in past])
                for role, other in roles.items()
            }
            mixed = replace(
                mixed,
                chances={
                    decision.key: by_role.get(decision.player, mixed).chances[decision.key]
                    for decision in self._exact.decisions()
                },
            )
        return {**row, "league/nash_conv_mixture": evaluate_table(game, mixed).nash_conv}

    # -------- Checkpoints

    def _weights_now(self, *learners: str) -> Weights:
        return {
            mine: self._engine.weights(mine) for each in learners for mine in self.learners[each].values()
        }

    def state(self) -> dict[str, Any]:
        """Return the state of the league, except the weights of snapshots, which are in the folder of the run."""
        return {
            "pool": self.pool.state(),
            "begun": self._begun,
            "line": list(self.line),
            "step": self._step,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        self.pool.load_state(state["pool"])
        # Games since the checkpoint are repeated and may differ, so a name may refer to a different snapshot.
        for slots in (self.in_slot, *(player.holds for player in self.players_of_steps)):
            slots.clear()
        self.tables.clear()
        self.strategies.clear()
        self._begun = bool(state["begun"])
        self.line = list(state["line"])
        self._step = int(state["step"])
        here = {member.name for member in self._everybody}
        for name in here & self.pool.gone.keys():
            del self.pool.gone[name]
        for name in self.snapshots.kept:
            taken = name.rpartition("@")[2]
            if name not in here and taken.isdecimal():
                self.pool.gone.setdefault(name, (int(taken), self._step or math.inf))


def _tabulated(setup: RolloutSetup, most: int) -> Enumerable | None:
    """Return the game if the team's policies can be converted to tables of at most `most` information states, or else None."""
    if enumerable(setup.environment, len(setup.team.names), most) is None:
        return None
    try:
        return check_tabular(setup)
    except ConfigError:
        return None


def _by_name(names: Sequence[str], shares: Iterable[float]) -> Chances:
    return {name: float(share) for name, share in zip(names, shares, strict=True)}
