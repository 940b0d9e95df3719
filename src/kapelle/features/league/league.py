"""The league in a run: past selves in the slots of the adapter bank, results of games, entries, and what can be computed exactly.

Slots are policies of the team map that no agent has and nobody trains; who sits in them changes from step to step. So a learner
plays ten opponents in one batch, and memory is bounded by `league.slots`. The weights of those who are not seated rest in the
machine's memory or in the run's folder `league`.
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
from kapelle.features.league.seating import Chances, Follower, MemberSeat, Seating, chances, met_in, seated
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
from kapelle.rollout.episodes import PlaysGroups, shared_rollout
from kapelle.rollout.evaluation.exploitability import (
    TabularPolicies,
    average,
    check_tabular,
    evaluate_table,
    language_table,
)
from kapelle.rollout.play import Play
from kapelle.rows import Column, Sample, turns_of
from kapelle.runs.named_checkpoint import policy_folder
from kapelle.runtime.files import replace_file
from kapelle.runtime.randomness import capture_random, derive_seed, restore_random
from kapelle.runtime.ranks import Ranks
from kapelle.runtime.tensors import copy_together
from kapelle.training.feature import Feature, StartedRun, StepInProgress
from kapelle.types import Cast, Group

Weights = Mapping[str, Mapping[str, Tensor]]
"""Policy → its weights by name."""
Load = Callable[[str, Mapping[str, Tensor], int], None]
"""Gives what plays a policy's weights, with their version."""
Save = Callable[[Path, str, Mapping[str, Tensor]], None]
"""Writes the adapter of a policy as a PEFT folder."""
SMALL = 1e-12
"""A weight that keeps a mixture defined where the meta-strategy draws only members whose policies are no tables."""
START = "start"
"""Under this name the weights of the learners at the start are kept, for those that begin anew."""


COMPARED = 16
"""Turns of each member that are compared with the train engine in each step."""


def _save(run: StartedRun, folder: Path, policy: str, weights: Mapping[str, Tensor]) -> None:
    own = run.team.policies[policy]
    assert own.lora is not None, "a member of a league is an adapter"
    model = run.models[own.base]
    save_adapter(
        folder, weights, named(layers_of(model.model), own.lora), model.name, run.base_hashes[own.base]
    )


class SnapshotStore:
    """The weights of snapshots: the latest used in memory, all of them in a folder where there is one."""

    def __init__(self, folder: Path | None, most: int, ranks: Ranks, save: Save) -> None:
        """Keep at most so many in memory if there is a folder, which all `ranks` can read and the first one writes."""
        self._folder, self._most, self._ranks, self._save = folder, most, ranks, save
        self._held: dict[str, Weights] = {}
        """The most recently used one last."""

    def put(self, name: str, weights: Weights) -> None:
        """Keep copies of a snapshot's weights; all ranks call it with the same."""
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
        """Write what is known of the pool beside a snapshot's weights, for people and the viewer."""
        if self._folder is not None and self._ranks.rank == 0:
            replace_file(self._folder / name / "standing.json", json.dumps(standing, indent=1).encode())

    def of(self, name: str, policies: Iterable[str]) -> Weights:
        """Return a snapshot's weights of these policies."""
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
        """Whose weights are in the folder, which a process that was killed may have left without an owner."""
        return [] if self._folder is None else sorted(each.name for each in self._folder.glob("*@*"))

    def forget(self, name: str) -> None:
        """Forget one that no checkpoint names any more."""
        self._held.pop(name, None)
        if self._folder is not None and self._ranks.rank == 0:
            shutil.rmtree(self._folder / name, ignore_errors=True)


@dataclass(slots=True)
class SlotHolder:
    """What plays members from its slots; those of a process that plays ahead change only between what it plays."""

    load: Load
    holds: dict[int, str] = field(default_factory=dict)
    """Slot → the member whose weights it has."""


class League(Feature):
    """Seats members before a step is played, and learns from its games who is how strong."""

    def __init__(self, settings: LeagueConfig, run: StartedRun) -> None:
        """Keep resting weights in the folder `league` of the run's directory, if it has one. Raises ConfigError for workers that cannot play pairs."""
        config, play, engine = run.config, run.play, run.engine
        self._settings, self._seed, self._steps = settings, config.seed, config.training.steps
        self._play, self._engine = play, engine
        self._players_of_steps = [SlotHolder(player.load) for player in run.players]
        folder = None if run.run_dir is None else run.run_dir / "league"
        team = play.team
        self._homes = tuple(name for name in team.names if team.policy(name).trained)
        self._learners: dict[str, dict[str, str]] = {
            MAIN: {team.policy_of[agent]: team.policy_of[agent] for agent in self._homes}
        }
        """Learner → the policy of the team map that a seat has → the learner's own in its place."""
        own = tuple(self._learners[MAIN])
        self._learners |= {
            learner: {policy: named(policy) for policy in own}
            for learner, named in added_learners(self._settings).items()
        }
        self._line = [name for name in self._learners if name == MAIN or name.startswith(FOLLOWER)]
        """Who enters next, and those behind it, each of which answers the members and the learners before it."""
        self._spread()
        self.pool = MemberPool(self._settings, fixed_members(self._settings, team))
        self._players = {member.plays: member.name for member in self.pool.members if member.plays}
        self._snapshots = SnapshotStore(folder, self._settings.in_memory, play.ranks, partial(_save, run))
        self._kept = folder is not None
        self._in_slot: dict[int, str] = {}
        self._tables: dict[str, TabularPolicies] = {}
        self._strategies: dict[tuple[str, ...], Mapping[str, Chances]] = {}
        """Members → the meta-strategy of their table, by agent at home; those of this moment alone."""
        self._begun = False
        self.began_anew = False
        """Whether a learner began at its start again after the last step: what it played ahead is not its own any more."""
        self._step = 0
        """The last one that it has learned from."""
        self._exact = _tabulated(play, self._settings.exact)
        if self.plays_pairs and len(run.players) > 1 and isinstance(play.engine, PlaysGroups):
            raise ConfigError(
                "`league` plays games for its table of payoffs, and with `training.overlap` the cluster's workers, which play them, play the "
                "next step at that time. Set `training.overlap: false`."
            )

    def _spread(self) -> None:
        """Let partners begin apart from one another: noise on the matrices B of their adapters (`population.spread`)."""
        population = self._settings.population
        if not isinstance(population, FcpPopulation) or not population.spread:
            return
        for partner in (own for learner, own in self._learners.items() if learner.startswith(PARTNER)):
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
        """Assign roles to members in the tasks of the steps that are collected next."""
        seating = self.seat(step.number)
        step.assign = lambda number, count: seating.casts(self._seed, number, count)

    def after_rollouts(self, step: StepInProgress) -> None:
        """Compare the members' samples with the train engine's log-probs."""
        gaps = self._engine.check_parity(self.parity_samples(step.groups, COMPARED))
        step.metrics |= {"league/parity": gaps["parity/max"]} if gaps else {}

    def after_update(self, step: StepInProgress) -> None:
        """Count the games, and let learners enter."""
        step.metrics |= self.learn(step.number, step.groups)
        step.restarted = step.restarted or self.began_anew

    def pruned(self, steps: Collection[int]) -> None:
        """Delete the weights of members that left and that no checkpoint names."""
        self.forget_unless_in(steps)

    # -------- Before a step

    def seat(self, number: int) -> Seating:
        """Return who may meet whom in the steps that are played next, `number` the first of them; fills the slots."""
        if not self._begun:
            self._begin()
        if not self._kept:  # in a run directory its checkpoints may name them
            self.forget_unless_in(())
        drawn: list[Mapping[str, Chances]] = [
            {home: self._chances(home, level) for home in self._homes} for level in range(len(self._line))
        ]
        if len(self._line) == 1:
            drawn = [self._thinned(drawn[0], number)]
        met = {
            name for each in drawn for own in each.values() for name, chance in own.items() if chance > 0.0
        }
        names = [each.name for each in self._everybody if each.kind == "past" and each.name in met]
        self.sit(names, self._players_of_steps)
        seats = {
            learner: tuple(
                MemberSeat(
                    member.name,
                    {home: own.get(member.name, 0.0) for home, own in each.items()},
                    self._policies(member),
                    member.plays,
                )
                for member in self.pool.before(level)
                if any(own.get(member.name, 0.0) > 0.0 for own in each.values())
            )
            for level, (learner, each) in enumerate(zip(self._line, drawn, strict=True))
        }
        exploiter = self._settings.exploiter
        return Seating(
            self._homes,
            seats[MAIN],
            self._settings.population.share,
            self._play.team.names,
            self._own_seats(EXPLOITER) if exploiter else {},
            exploiter.share if exploiter else 0.0,
            tuple(self._own_seats(learner) for learner in self._learners if learner.startswith(PARTNER)),
            self._partners_until,
            tuple(
                Follower(learner, self._own_seats(learner), seats[learner])
                for learner in self._learners
                if learner.startswith(FOLLOWER)
            ),
        )

    @property
    def _everybody(self) -> list[LeagueMember]:
        """The members, and the drafts of those who learn before another learner."""
        return self.pool.before(len(self._line))

    def _thinned(self, drawn: Mapping[str, Chances], number: int) -> Mapping[str, Chances]:
        """Return the chances by home of those who are seated: drawn among the past selves where these are more than slots.

        Homes whose mixtures differ share the slots out among themselves.
        """
        past, slots = [member.name for member in self.pool.past], self._settings.slots
        if sum(any(own.get(name, 0.0) > 0.0 for own in drawn.values()) for name in past) <= slots:
            return drawn
        alike = all(own == drawn[self._homes[0]] for own in drawn.values())
        room, seed = slots if alike else slots // len(drawn), derive_seed(self._seed, "seated", number)
        return {home: seated(own, past, room, seed) for home, own in drawn.items()}

    def _own_seats(self, learner: str) -> dict[str, str]:
        """Return the policy that a learner has at each seat that learns."""
        own = self._learners[learner]
        return {agent: own[self._play.team.policy_of[agent]] for agent in self._homes}

    @property
    def _partners_until(self) -> int:
        population = self._settings.population
        return int(population.alone * self._steps) if isinstance(population, FcpPopulation) else 0

    def _enters(self, learner: str, number: int) -> bool:
        """Return whether a learner enters after this step; with partners, these do while they learn, and nobody else."""
        if isinstance(self._settings.population, FcpPopulation) and not (
            learner.startswith(PARTNER) and number <= self._partners_until
        ):
            return False
        return learner not in self._line[1:] and self.pool.may_enter(learner, number)

    def _begin(self) -> None:
        """Keep the learners as they are at the start, and let them be the first member."""
        self._snapshots.put(START, self._weights_now(*self._learners))
        # Where a game of the table failed before, it is there.
        if self._settings.enter is not None and self._settings.start and not self.pool.past:
            self._enter(MAIN, 0)
        self._redraft(0)
        self._begun = True

    def _chances(self, home: str, level: int = 0) -> Chances:
        return chances(self._settings, self.pool, MAIN, self._strategy(level).get(home))

    def sit(self, names: Sequence[str], players: Iterable[SlotHolder] = ()) -> None:
        """Put snapshots into the slots of the train engine, in this order, and of these players."""
        for slot, name in enumerate(names):
            if self._in_slot.get(slot) != name:
                for policy, weights in self._snapshots.of(name, self._learners[MAIN]).items():
                    seat = slot_name(slot, policy)
                    self._engine.load_weights(seat, self._placed(seat, weights))
                self._in_slot[slot] = name
            for player in players:
                if player.holds.get(slot) != name:
                    serial = next(member.serial for member in self._everybody if member.name == name)
                    for policy in self._learners[MAIN]:
                        seat = slot_name(slot, policy)
                        player.load(seat, self._engine.weights(seat), serial)
                    player.holds[slot] = name

    def _policies(self, member: LeagueMember) -> dict[str, str]:
        """Return the policy that plays each agent's seat for a member that is seated."""
        team = self._play.team
        if member.kind != "past":
            return dict(member.policies)
        slot = next(slot for slot, name in self._in_slot.items() if name == member.name)
        return {
            agent: slot_name(slot, team.policy_of[agent]) if agent in self._homes else team.policy_of[agent]
            for agent in team.names
        }

    # -------- After a step

    def parity_samples(self, groups: Sequence[Group], most: int) -> list[Sample]:
        """Return up to `most` turns of each member's policy with the log-probs that they were sampled with.

        Nobody trains on these turns, so that no update would notice a sampler that plays a member with other weights. Turns of
        members that have left their slot since are left out, as are those of servers, which say no log-probs.
        """
        team = self._play.team
        seated = {
            slot_name(slot, own): member
            for slot, member in self._in_slot.items()
            for own in self._learners[MAIN]
        }
        chosen: dict[str, list[Sample]] = {}
        for group in groups:
            for _, turn in turns_of([group], trained_only=False):
                cast = group.task.cast.get(turn.agent)
                if turn.trained or cast is None or not turn.logprobs or turn.policy != cast.policy:
                    continue
                policy = team.policies[turn.policy]
                own = chosen.setdefault(policy.name, [])
                there = seated.get(policy.name, cast.player)
                if policy.endpoint is None and there == cast.player and len(own) < most:
                    columns: dict[str, Tensor] = {Column.BEHAVIOUR: torch.tensor(turn.logprobs)}
                    own.append(policy_sample(turn, team, policy.name, columns))
        return [sample for own in chosen.values() for sample in own]

    def learn(self, number: int, groups: Sequence[Group]) -> dict[str, float]:
        """Count the games of step `number`, let learners enter, and return metrics; the learners are as after the step."""
        self._step, self.began_anew = number, False
        self.pool.fade()
        team, invalid, turns = self._play.team, 0.0, 0
        earned: dict[str, list[float]] = {}
        among_selves: list[float] = []
        alike, paid = True, False
        for group in groups:
            met = met_in(group.task.cast, team.names, self._homes)
            ahead = []
            for episode in group.valid:
                totals = [episode.total(agent) for agent in team.names]
                alike = alike and math.isclose(min(totals), max(totals), abs_tol=SMALL)
                paid = paid or any(totals)  # in a zero-sum game draws alone are alike
                if isinstance(made := episode.info.get("invalid"), Mapping):
                    own = [agent for agent in made if any(turn.trained for turn in episode.by(agent))]
                    invalid += sum(float(made[agent]) for agent in own)
                    turns += sum(len(episode.by(agent)) for agent in own)
                if met is None:
                    if not group.task.cast:  # partners of fictitious co-play have one
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
        if alike and paid and among_selves and MAIN in earned:
            row["league/cross_play_gap"] = fmean(among_selves) - fmean(earned[MAIN])
        entered = [learner for learner in self._learners if self._enters(learner, number)]
        for learner in entered:
            row |= self._enter(learner, number)
        population = self._settings.population
        if isinstance(population, PsroPopulation) and (entered or number % population.refresh == 0):
            self._redraft(number)
        mean = [
            fmean(each) for each in zip(*(self._chances(home).values() for home in self._homes), strict=True)
        ]
        row |= {"league/members": float(len(self.pool.members))}
        if mean:
            row["league/effective_members"] = effective_number(mean)
        return row

    def _enter(self, learner: str, number: int) -> dict[str, float]:
        """Let a learner enter as it is; return what is known exactly then."""
        own = self._learners[learner]
        member, out = self.pool.enter(learner, number)
        self.pool.gone.pop(member.name, None)  # a step that did not end has left weights of this name
        # A snapshot is stored by the policies whose seats it can take.
        self._snapshots.put(member.name, {policy: self._engine.weights(mine) for policy, mine in own.items()})
        if out is not None:
            self._tables.pop(out.name, None)
        row = {}
        if tabled := self._paired:
            self._fill_payoffs(tabled)
            table = self._payoff_table(tabled)
            if can_measure_diversity():
                row["league/diversity"] = effective_diversity((table - table.T) / 2)
        if learner in self._line:
            self.pool.since |= dict.fromkeys(self._line, number)
            row |= self._measured()
        rated = self._ratings()
        if learner in self._line and member.name in rated:
            row |= zip(
                ("league/rating", "league/rating_low", "league/rating_high"), rated[member.name], strict=True
            )
        self._snapshots.note(member.name, self._standing(member.name, number, rated))
        if number:
            self._begin_anew(learner, last=number == self._steps)
        return row

    def _begin_anew(self, learner: str, *, last: bool) -> None:
        """Send one that has entered to the end of its line; there it begins at its start, or goes on, as the settings say.

        After the `last` step it stays what it has become: the team that the run ends with.
        """
        if learner in self._line:
            self._line.remove(learner)
            self._line.append(learner)
        said = self._settings.exploiter if learner == EXPLOITER else self._settings.enter
        if said is not None and said.restart and not (last and learner in self._line):
            self.began_anew = True
            start = self._snapshots.of(START, self._weights_now(*self._learners))
            for mine in self._learners[learner].values():
                self._engine.load_weights(mine, self._placed(mine, start[mine]))

    def _redraft(self, number: int) -> None:
        """Take drafts of all but the last of the line as they are after a step, and fill the table for those behind them."""
        if len(self._line) == 1:
            return
        for draft in self.pool.drafts:
            self._tables.pop(draft.name, None)
        for draft, learner in zip(self.pool.redraft(self._line[:-1], number), self._line, strict=False):
            own = self._learners[learner]
            self.pool.gone.pop(draft.name, None)  # as in `_enter`
            self._snapshots.put(
                draft.name, {policy: self._engine.weights(mine) for policy, mine in own.items()}
            )
        self._fill_payoffs(self._everybody)

    def admit(self, member: LeagueMember, weights: Weights) -> None:
        """Let a snapshot enter that was made elsewhere: its weights by the policies whose seats it takes."""
        self.pool.members.append(member)
        self.pool.entered = max(self.pool.entered, member.serial)
        self._snapshots.put(member.name, weights)

    def forget_unless_in(self, checkpoints: Iterable[int]) -> None:
        """Forget the weights of those who left by the last of these steps and whom no checkpoint of them names; of all where there is none."""
        kept = list(checkpoints)
        last = max(kept, default=math.inf)
        for name, (taken, left) in list(self.pool.gone.items()):
            if left <= last and not any(taken <= step < left for step in kept):
                del self.pool.gone[name]
                self._snapshots.forget(name)

    def _placed(self, policy: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key: weights[key].to(own.device) for key, own in self._engine.weights(policy).items()}

    # -------- The table of all pairs, and what follows from it

    def _fill_payoffs(self, members: Sequence[LeagueMember]) -> None:
        """Find what is missing in the table of payoffs of these."""
        for home in self._homes:
            for one in members:
                for other in members:
                    key = home, one.name, other.name
                    if key not in self.pool.payoffs:
                        self.pool.payoffs[key], self.pool.payoff_games[key] = self._worth(home, one, other)

    def _worth(self, home: str, one: LeagueMember, other: LeagueMember) -> tuple[float, int]:
        """Return what an agent earns on average if one member sits there and another one in all other seats, and in how many games.

        These are 0 where the value is computed exactly.
        """
        team = self._play.team
        if self._exact is not None and "past" == one.kind == other.kind:
            table, rest = self._table(one), self._table(other)
            seat = team.names.index(home)
            joint = {
                decision.key: (table if decision.seat == seat else rest).chances[decision.key]
                for decision in self._exact.decisions()
            }
            return self._exact.exact_values(joint)[0][seat], 0
        past = [each.name for each in (one, other) if each.kind == "past"]
        self.sit(list(dict.fromkeys(past)), self._players_of_steps[:1])
        owned = {agent: one if agent == home else other for agent in team.names}
        cast = {
            agent: Cast(self._policies(each).get(agent, ""), each.plays or each.name)
            for agent, each in owned.items()
        }
        population = self._settings.population
        games = population.games if isinstance(population, PsroPopulation) else self._settings.pair_games
        # The same deals for every pair.
        tasks = [
            replace(
                self._play.environment.task("train", derive_seed(self._seed, "table", k) >> 16), cast=cast
            )
            for k in range(games)
        ]
        drawn = capture_random()
        groups = shared_rollout(self._play, tasks, 1, derive_seed(self._seed, "table"))
        restore_random(drawn)
        found = [episode.total(home) for group in groups for episode in group.valid]
        if not found:
            reason = next(
                (episode.error for group in groups for episode in group.episodes if episode.error), ""
            )
            raise EpisodeError(
                f"No game of '{one.name}' against '{other.name}' could be played to its end: {reason}"
            )
        return fmean(found), len(found)

    def _strategy(self, level: int = 0) -> Mapping[str, Chances]:
        """Return, by agent at home, how likely the others should be each member by the table; nothing without a table.

        A learner with others before it (`level` of them) meets these too.
        """
        own = tuple(member.name for member in self.pool.before(level))
        if own not in self._strategies:
            every = {tuple(each.name for each in self.pool.before(k)) for k in range(len(self._line))}
            self._strategies = {names: old for names, old in self._strategies.items() if names in every}
            self._strategies[own] = self._strategy_of(self.pool.before(level))
        return self._strategies[own]

    def _strategy_of(self, members: Sequence[LeagueMember]) -> Mapping[str, Chances]:
        population = self._settings.population
        if not isinstance(population, PsroPopulation) or not members:
            return {}
        self._fill_payoffs(members)
        names, homes = [member.name for member in members], self._homes
        if len(homes) == len({self._play.team.policy_of[home] for home in homes}) == 2:
            # Rows are the first agent's members, columns the second's.
            first, second = (np.array(self._payoffs(home, names)) for home in homes)
            one, other = meta_strategy([first, second.T], population.by)
            return dict(zip(homes, (_by_name(names, other), _by_name(names, one)), strict=True))
        table = self._payoff_table(members)
        _, shared = meta_strategy([table, table.T], population.by)
        return dict.fromkeys(homes, _by_name(names, shared))

    def _payoffs(self, home: str, names: Sequence[str]) -> list[list[float]]:
        """Return what an agent earns as each member (rows) where the others are each member (columns)."""
        return [[self.pool.payoffs[home, one, other] for other in names] for one in names]

    def _payoff_table(self, members: Sequence[LeagueMember]) -> NDArray[np.float64]:
        """Return what a member (rows) earns against each (columns) in a seat drawn by lot."""
        names = [member.name for member in members]
        table: NDArray[np.float64] = np.array([self._payoffs(home, names) for home in self._homes]).mean(
            axis=0
        )
        return table

    @property
    def plays_pairs(self) -> bool:
        """Whether pairs of members play for the table, as not all of them are computed."""
        if isinstance(self._settings.population, PsroPopulation):
            return self._exact is None or bool(self._settings.members)
        return self._exact is None and self._settings.pair_games > 0

    @property
    def _paired(self) -> list[LeagueMember]:
        """The members whose pairs are in the table: all with `psro`; else past selves, where that is exact or `pair_games` are played."""
        if isinstance(self._settings.population, PsroPopulation):
            return self.pool.members
        paired = self._exact is not None or self._settings.pair_games > 0
        # Past selves of the only agent that learns have no seat but its own, and never meet.
        return self.pool.past if paired and len(self._homes) > 1 else []

    def _ratings(self) -> dict[str, tuple[float, float, float]]:
        """Return the members' ratings with their 95 % intervals, the first member that games link to the newest one at 0.

        The games of one task are not independent, so that all count as the independent games that they are worth.
        """
        known = self.pool.names
        places = {member: place for place, member in enumerate(known)}
        results: dict[tuple[int, int], tuple[float, float, float]] = {}
        worth = 1.0 / dependence(self.pool.met.values())
        for (entrant, member), score in self.pool.met.items():
            if entrant in places and member in places and entrant != member:
                one, other = places[entrant], places[member]
                counts = (score.wins * worth, score.draws * worth, score.losses * worth)
                results[min(one, other), max(one, other)] = counts if one < other else counts[::-1]
        own = next((group for group in linked(len(known), results) if len(known) - 1 in group), [])
        if len(own) < 2:
            return {}
        return {known[k]: rating for k, rating in ratings(own, results, zero=min(own)).items()}

    def _standing(
        self, member: str, step: int, rated: Mapping[str, tuple[float, float, float]]
    ) -> dict[str, Any]:
        """Return who is in the pool and how strong, for `standing.json` beside a snapshot's weights."""
        payoffs = None
        if tabled := self._paired:
            names = [each.name for each in tabled]
            games = [[self._payoff_games(one, other) for other in names] for one in names]
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
            "strategy": {home: dict(self._chances(home)) for home in self._homes},
        }

    def _payoff_games(self, one: str, other: str) -> int | None:
        """Return how many games a cell of the table is of, 0 if none had to be played; None if a checkpoint did not say."""
        counts = [self.pool.payoff_games.get((home, one, other)) for home in self._homes]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    # -------- What is known exactly of small games

    def _table(self, member: LeagueMember) -> TabularPolicies:
        if member.name not in self._tables:
            self.sit([member.name])
            team = self._play.team
            owned = {**team.policy_of, **self._policies(member)}
            self._tables[member.name] = language_table(
                replace(self._play, team=replace(team, policy_of=owned)), self._engine.score
            )
        return self._tables[member.name]

    def _measured(self) -> dict[str, float]:
        """Return how far from an equilibrium the newest snapshot and the mixture of the pool are, where that is known."""
        past = self.pool.past
        if self._exact is None or not past:
            return {}
        newest = evaluate_table(self._play.environment, self._table(past[-1]))
        row = {"league/nash_conv": newest.nash_conv, "league/legal": newest.legal}
        game = self._play.environment
        tables = [self._table(member) for member in past]
        mixed = average(game, tables)
        if strategies := self._strategy():
            # Every seat is mixed by what those opposite expect of it.
            seats = {
                self._play.team.names.index(agent): next((o for o in self._homes if o != agent), agent)
                for agent in self._homes
            }
            by_seat = {
                seat: average(game, tables, [strategies[other][member.name] + SMALL for member in past])
                for seat, other in seats.items()
            }
            mixed = replace(
                mixed,
                chances={
                    decision.key: by_seat.get(decision.seat, mixed).chances[decision.key]
                    for decision in self._exact.decisions()
                },
            )
        return {**row, "league/nash_conv_mixture": evaluate_table(game, mixed).nash_conv}

    # -------- Checkpoints

    def _weights_now(self, *learners: str) -> Weights:
        return {
            mine: self._engine.weights(mine) for each in learners for mine in self._learners[each].values()
        }

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: everything but the weights of snapshots, which rest in the run's folder."""
        return {
            "pool": self.pool.state(),
            "begun": self._begun,
            "line": list(self._line),
            "step": self._step,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.pool.load_state(state["pool"])
        # Names may stand for others now: what was played since is forgotten, and need not come out the same again.
        for slots in (self._in_slot, *(player.holds for player in self._players_of_steps)):
            slots.clear()
        self._tables.clear()
        self._strategies.clear()
        self._begun = bool(state["begun"])
        self._line = list(state["line"])
        self._step = int(state["step"])
        here = {member.name for member in self._everybody}
        for name in here & self.pool.gone.keys():
            del self.pool.gone[name]
        for name in self._snapshots.kept:
            taken = name.rpartition("@")[2]
            if name not in here and taken.isdecimal():
                self.pool.gone.setdefault(name, (int(taken), self._step or math.inf))


def _tabulated(play: Play, most: int) -> Enumerable | None:
    """Return the game if the team's policies in it are tables of at most `most` information states; None otherwise."""
    if enumerable(play.environment, len(play.team.names), most) is None:
        return None
    try:
        return check_tabular(play)
    except ConfigError:
        return None


def _by_name(names: Sequence[str], shares: Iterable[float]) -> Chances:
    return {name: float(share) for name, share in zip(names, shares, strict=True)}
