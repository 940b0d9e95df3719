"""Rollout workers on a cluster: actors that play whole groups of episodes for a rank of the trainer.

Groups are dealt in turn, as ranks deal them, and how a group is played depends on its task, its seed and the weights alone.
So a worker that dies is started again, gets the current weights and replays its groups, with the same result.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.cluster.actors import (
    ActorCall,
    ActorConnection,
    ActorLost,
    StartedWorker,
    Waiting,
    check_hashes,
    own_address,
    settle_in,
)
from kapelle.cluster.placement import RayPlacement, RolloutPlace, placement_here
from kapelle.cluster.sampling import sampled_by_pools
from kapelle.cluster.scoring import RayScorers
from kapelle.cluster.worlds import HeldByActor
from kapelle.engines.rollout.protocol import Completion, Renderer, Request
from kapelle.errors import ConfigError, EngineError, KapelleError
from kapelle.rollout.episodes import PlaysGroups, play_groups, rollout
from kapelle.rollout.partial import EndOfStep, PartialGroup, dump_partial, load_partial
from kapelle.rollout.play import Play
from kapelle.rollout.replica import Elsewhere, TeamReplica, moves
from kapelle.rollout.workers.pool import HeldHere, Hold
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runs.timeline import Timeline
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.foreign_code import received_error, sent_error
from kapelle.runtime.randomness import capture_random, random_as_lists, random_from_lists, restore_random
from kapelle.runtime.rank_group import StoreMeeting, meeting_from, own_store
from kapelle.runtime.ranks import Meeting, Ranks
from kapelle.runtime.tensors import packed, unpacked
from kapelle.runtime.wire.exact_json import decode, encode
from kapelle.runtime.wire.worlds import task_form, task_from
from kapelle.settings.schema import Resources
from kapelle.team import split_scored
from kapelle.types import Group, Sampling, Task

if TYPE_CHECKING:
    from kapelle.engines.train.protocol import TrainEngine
    from kapelle.models.language_model import LanguageModel
    from kapelle.settings.schema import RunConfig
    from kapelle.setup.preparation import PreparedRun
    from kapelle.team import Team


@dataclass(slots=True, eq=False)
class _RayWorker:
    """A rollout worker: its place, what is started there, and the weights that this has."""

    place: RolloutPlace
    started: StartedWorker | None = None
    not_before: float = 0.0
    """When it may be started again."""
    has: dict[str, int] = field(default_factory=dict)
    """Policy → number of the weights that it was sent."""


@dataclass(slots=True, eq=False)
class _Share:
    """Groups that a worker plays."""

    place: int
    """The place of the worker that plays it, unless another one has to."""
    question: Mapping[str, Any]
    worker: _RayWorker | None = None
    started: StartedWorker | None = None
    """What was asked of it."""
    asked: ActorCall | None = None
    answer: list[bytes] | None = None


def players_on(
    prepared: PreparedRun,
    hashes: Mapping[str, str],
    models: Mapping[str, LanguageModel],
    engine: TrainEngine,
    ranks: Ranks,
    closing: ExitStack,
) -> tuple[RayWorkers | None, Hold, RayScorers | None, Mapping[str, str]]:
    """Return what plays and scores for the rank that Ray has placed here.

    That is rollout workers, or else None; what holds the rank's own worlds; what asks scoring workers, where there are some and
    something is only scored; and `hashes` with those of the bases that the scoring workers alone hold. `closing` releases what they
    need. See `RayWorkers` and `RayScorers` for the other arguments.
    """
    placed = placement_here()
    assert placed is not None, "Ray has placed this rank"
    config, team, bundles = prepared.config, prepared.team, placed.bundles
    apart = config.ray.scoring_workers and split_scored(team)[1].bases
    player: RayWorkers | None = None
    hold: Hold = HeldHere
    connection: ActorConnection | None = None
    in_memory = [path for path in team.bases.values() if path in prepared.given]
    if bundles.rollout and in_memory:
        raise ConfigError(
            f"Rollout workers read models from the disk, but the model '{in_memory[0]}' is in the trainer's memory. Save it and "
            "name its folder as `model.path`, or set `ray.rollout_workers: 0`."
        )
    if bundles.rollout or bundles.worlds or bundles.scoring:
        connection = ActorConnection.join(placed.address, placed.group, placed.namespace)
        closing.callback(connection.leave)
    scorers = None
    if apart:
        scorers = RayScorers(connection, bundles.scoring, prepared, models, engine, ranks)
        closing.callback(scorers.close)
    if connection is not None and bundles.rollout:
        player = RayWorkers(connection, placed, config, team, hashes, models, engine)
    elif connection is not None and bundles.worlds:
        hold = partial(HeldByActor, connection, bundles.worlds, config.ray.environment, str(Path.cwd()))
    if scorers is not None:  # while the rollout workers load their models too
        hashes = scorers.hashes(hashes)
    return player, hold, scorers, hashes


class RayWorkers(PlaysGroups):
    """The rollout workers of one rank."""

    def __init__(
        self,
        connection: ActorConnection,
        placed: RayPlacement,
        config: RunConfig,
        team: Team,
        hashes: Mapping[str, str],
        models: Mapping[str, LanguageModel],
        engine: TrainEngine,
    ) -> None:
        """Start the workers, which load their models meanwhile.

        `team` names the bases' paths on the disk, `hashes` are their weights'; `engine` holds all policies.
        """
        self._config, self._team, self._hashes, self._models = config, team, dict(hashes), models
        self._bases = dict(team.bases)
        self._begin_with = {
            "config": config.model_dump(mode="json"),
            "bases": self._bases,
            "path": sys.path,
            "folder": str(Path.cwd()),
            "group": placed.group,
        }
        self._connection = connection
        self._weights: dict[str, tuple[int, object]] = {}
        """Policy → number, from 1, and what is stored of its weights."""
        self._waiting = Waiting("rollout worker", "played", "ray.rollout", config.ray.timeout)
        self._under_way: list[_Share] = []
        """Shares that were asked for and not waited for yet."""
        self._plays = 0
        """Steps whose groups may be left that were asked for."""
        self._players: StoreMeeting | None = None
        """Where the workers of all ranks agree on the end of a step, as seen by this process."""
        self._store: Any = None
        """What keeps that where there is one rank."""
        for name, policy in team.policies.items():
            if moves(policy):
                self.load(name, engine.weights(name), 0)
        self._workers = [_RayWorker(place) for place in placed.bundles.rollout]
        for worker in self._workers:
            self._start(worker)

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that it holds."""
        return tuple(self._team.policies)

    def renderer(self, policy: str) -> Renderer:
        """Return how a policy's conversations become tokens."""
        return self._models[self._team.policies[policy].base].renderer

    async def generate(self, request: Request) -> Completion:
        """Refuse: the workers play whole groups."""
        raise EngineError(
            f"A rollout worker plays whole groups, and '{request.agent}' asked for one completion. Set `ray.rollout_workers: 0` "
            "to sample in the trainer's processes."
        )

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Store new weights of a policy; each worker takes them before it plays again."""
        tensors: Any = weights
        number = self._weights[policy][0] + 1 if policy in self._weights else 1
        stored = self._connection.store(packed({"policy": policy, "version": version}, tensors))
        self._weights[policy] = (number, stored)

    @property
    def weights(self) -> Mapping[str, Mapping[str, Any]]:
        """See `PlaysGroups`: a copy from the cluster's store."""
        return {
            name: unpacked(self._connection.fetch(stored))[1] for name, (_, stored) in self._weights.items()
        }

    def release_caches(self) -> None:
        """Do nothing: workers release theirs after every question."""

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            if worker.started is not None:
                worker.started.actor.end()
                worker.started = None

    def ask_groups(
        self, play: Play, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
    ) -> Callable[[], list[Group]]:
        """Let the workers play; see `rollout.episodes.PlaysGroups`.

        Who waits gets what a worker raised, StopRequested, and EngineError where workers die again and again.
        """
        sampling = play.sampling
        sets = self._config.evaluation.sets
        question = {
            "random": random_as_lists(capture_random()),
            # The worker has the same settings: it plays in its own environment of this name, or in the run's.
            "set": next((name for name, each in sets.items() if each is play.environment), None),
            "tasks": [task_form(task) for task in tasks],
            "samples": samples,
            "seed": seed,
            "plainly": play.tree is None and play.interventions is None and not play.widths,
            "sampling": None if sampling is None else {name: asdict(each) for name, each in sampling.items()},
        }
        count = len(self._workers)
        shares = [_Share(k, {**question, "own": list(own[k::count])}) for k in range(count) if own[k::count]]
        answers = self._asked(play, shares)

        def wait() -> list[Group]:
            found: dict[int, Group] = {}
            for share, (drawn, *rows) in zip(shares, answers(), strict=True):
                if share is shares[0]:
                    restore_random(random_from_lists(json.loads(drawn)["random"]))
                found |= zip(share.question["own"], load_groups(map(json.loads, rows)), strict=True)
            return [found[place] for place in own]

        return wait

    def ask_partial(
        self, play: Play, pool: Sequence[PartialGroup], enough: EndOfStep, meeting: Meeting
    ) -> Callable[[], Mapping[int, PartialGroup]]:
        """Let the workers play on; see `rollout.episodes.PlaysGroups`. The workers of all ranks agree when the step ends."""
        # Workers were dealt to the ranks in turn: this is the place of the k-th of this rank among all.
        count = self._config.ray.rollout_workers
        seats = [meeting.rank + k * meeting.size for k, _ in enumerate(self._workers)]
        self._plays += 1
        form = None
        if count > 1:
            if self._players is None:
                where = meeting.form
                if where is None:
                    self._store, where = own_store(own_address())
                prefix = f"{where['prefix']}/workers"
                self._players = meeting_from({**where, "prefix": prefix, "rank": seats[0], "size": count})
            self._players.begin(self._plays)
            form = self._players.form
        question = {
            "random": random_as_lists(capture_random()),
            "tasks": [],
            "play": self._plays,
            "enough": asdict(enough),
        }
        shares = [
            _Share(
                k,
                {
                    **question,
                    "meeting": None if form is None else {**form, "rank": seat},
                    "left": dump_partial(pool[seat::count]),
                },
            )
            for k, seat in enumerate(seats)
        ]
        answers = self._asked(play, shares)

        def wait() -> Mapping[int, PartialGroup]:
            found: dict[int, PartialGroup] = {}
            for seat, (drawn, *rows) in zip(seats, answers(), strict=True):
                if seat == seats[0]:
                    restore_random(random_from_lists(json.loads(drawn)["random"]))
                own = load_partial(b"\n".join(rows).decode())
                found |= zip(range(seat, len(pool), count), own, strict=True)
            return found

        return wait

    def _asked(self, play: Play, shares: Sequence[_Share]) -> Callable[[], list[list[bytes]]]:
        """Ask the workers, and return what waits for their answers."""
        self._under_way += shares
        self._ask(shares)

        def wait() -> list[list[bytes]]:
            play.timeline.enter("generate")
            try:
                self._gather(shares)
            except BaseException as error:
                if self._players is not None:
                    self._players.fail(error)
                self.abandon()
                raise
            finally:
                play.timeline.leave()
            self._under_way = [share for share in self._under_way if share not in shares]
            return [share.answer for share in shares if share.answer is not None]

        return wait

    def abandon(self) -> None:
        """End the workers that still play what was asked for: nobody wants it any more."""
        for share in self._under_way:
            worker = share.worker
            if share.answer is None and worker is not None and worker.started is not None:
                worker.started.actor.end()
                worker.started = None
        self._under_way = []

    def _ask(self, shares: Sequence[_Share]) -> None:
        """Ask every share that nobody has been asked for; where its worker has died, another one is asked."""
        for share in shares:
            if share.asked is not None or share.answer is not None:
                continue
            worker = share.worker = self._player_of(share.place)
            started = share.started = worker.started
            assert started is not None, "who plays was started"
            new = {name: held for name, held in self._weights.items() if worker.has.get(name) != held[0]}
            text = json.dumps(encode(share.question, "tasks")).encode()
            share.asked = started.actor.ask("play", text, *(stored for _, stored in new.values()))
            worker.has |= {name: number for name, (number, _) in new.items()}

    def _player_of(self, place: int) -> _RayWorker:
        """Return the worker that plays the share of a place: its own, or where that may not have joined yet, one that is there.

        Shares stay the same, whoever is there, and with them the batches and the last bits of what they sample.
        """
        for worker in self._workers:
            if worker.started is None and time.monotonic() >= worker.not_before:
                self._start(worker)
        there = [
            worker for worker in self._workers if worker.place.bundle is not None or self._joined(worker)
        ]
        own = self._workers[place]
        return own if own in there else there[place % len(there)]

    def _joined(self, worker: _RayWorker) -> bool:
        """Return whether a worker that may come at any time has come, and loaded its models."""
        started = worker.started
        if started is not None and started.beginning is not None and started.has_begun:
            try:
                self._check_bases(started)
                self._say("a worker has joined")
            except ActorLost as lost:  # wait for another one
                self._say(f"a worker has left before it had played ({lost})")
                self._start(worker)
            except KapelleError as error:  # a machine that cannot play ends no run that goes on without it
                started.actor.end()
                worker.started = None
                worker.not_before = time.monotonic() + self._config.ray.timeout
                self._say(f"a worker that has joined cannot play: {error}")
        return worker.started is not None and worker.started.beginning is None

    def _say(self, what: str) -> None:
        there = sum(
            worker.started is not None and worker.started.beginning is None for worker in self._workers
        )
        logging.getLogger(__name__).warning(
            "kapelle: Rollout workers: %s; of %d there are %d.", what, len(self._workers), there
        )

    def _check_bases(self, started: StartedWorker) -> None:
        """Raise ConfigError if a worker has read other models than the trainer."""
        if started.beginning is not None:
            found = json.loads(_read(started.beginning)[0])["hashes"]
            check_hashes("rollout worker", "the trainer", self._hashes, found, self._bases)
            started.beginning = started.up = None

    def _gather(self, shares: Sequence[_Share]) -> None:
        """Wait until every share is answered, asking again where a worker has died."""
        while waiting := [share for share in shares if share.answer is None]:
            self._ask(waiting)
            asked = [share.asked for share in waiting if share.asked is not None]
            first = self._waiting.first(
                [share.started for share in waiting if share.started is not None], asked
            )
            for share in waiting:
                if first is None or share.asked is not first:
                    continue
                worker, started = share.worker, share.started
                assert worker is not None, "it was asked"
                assert started is not None, "it was asked"
                try:
                    self._check_bases(started)
                    share.answer = _read(first)
                    self._waiting.answered()
                except ActorLost as lost:
                    share.asked = None
                    if worker.started is not started:  # lost with another share that it had
                        continue
                    worker.started = None
                    if worker.place.bundle is None:
                        self._say(f"a worker that had joined has left ({lost}); others play its groups")
                    self._waiting.died(lost)

    def _start(self, worker: _RayWorker) -> None:
        actor = self._connection.actor(RayPlayer, worker.place.bundle, self._config.ray.rollout)
        said = {**self._begin_with, "worlds": worker.place.worlds, "samplers": worker.place.samplers}
        worker.started = StartedWorker.of(actor, json.dumps(said).encode())
        worker.has = {}


def _read(asked: ActorCall) -> list[bytes]:
    """Return the lines of a worker's answer; raises what it raised."""
    lines = bytes(asked.answer()).splitlines()
    head = json.loads(lines[0])
    if "error" in head:
        raise received_error(head["error"], "A rollout worker")
    return lines


# -------- The actor


class RayPlayer:
    """The actor: a team that plays. An error is an answer (`sent_error`), so that the trainer can raise the same one."""

    def __init__(self) -> None:
        self._team: TeamReplica | None = None
        self._meeting: Meeting | None = None

    def here(self) -> None:
        """Answer, which shows that the actor runs."""

    def begin(self, start_with: bytes) -> bytes:
        """Build the team: settings, bases, and what to import from, as JSON. Returns the hashes of its bases."""
        said = json.loads(start_with)
        settle_in(self, said)
        return _answered(self._begin, said)

    def _begin(self, said: Mapping[str, Any]) -> bytes:
        import torch

        hold: Hold = HeldHere
        if said["worlds"]:
            connection = ActorConnection.of_actor(said["group"])
            takes = Resources.model_validate(said["config"]["ray"]["environment"])
            hold = partial(HeldByActor, connection, said["worlds"], takes, said["folder"])
        elsewhere: Elsewhere | None = None
        if said["samplers"]:
            connection = ActorConnection.of_actor(said["group"])
            elsewhere = partial(sampled_by_pools, connection, said)
        threads = torch.get_num_threads()
        self._team = TeamReplica(said["config"], said["bases"], threads, hold, elsewhere)
        return json.dumps({"hashes": self._team.hashes}).encode()

    def play(self, question: bytes, *weights: bytes) -> bytes:
        """Take new weights, then play groups; returns the generators' states after it, and the groups as JSON lines."""
        return _answered(self._play, question, weights)

    def _play(self, question: bytes, weights: Sequence[bytes]) -> bytes:
        assert self._team is not None, "a player begins first"
        team, said = self._team, decode(json.loads(question))
        for data in weights:
            plain, tensors = unpacked(data)
            team.play.engine.load(plain["policy"], tensors, plain["version"])
        restore_random(random_from_lists(said["random"]))
        played = self._play_on(said) if "left" in said else self._play_whole(said)
        drawn = json.dumps({"random": random_as_lists(capture_random())}).encode()
        team.play.engine.release_caches()  # what is kept would depend on what was played before, and a new worker has nothing
        return drawn + b"\n" + played

    def _play_on(self, said: Mapping[str, Any]) -> bytes:
        """Play groups until, with those of all workers, enough are done; return them as JSON lines."""
        assert self._team is not None, "a player begins first"
        if self._meeting is None:
            self._meeting = Meeting() if said["meeting"] is None else meeting_from(said["meeting"])
        meeting = self._meeting
        meeting.begin(said["play"])
        play, enough = replace(self._team.play, timeline=Timeline()), EndOfStep(**said["enough"])
        groups = load_partial(said["left"])
        try:
            played = run_async(lambda: play_groups(play, groups, enough, meeting))
        except Exception as error:
            meeting.fail(error)
            raise
        return dump_partial(played).encode()

    def _play_whole(self, said: Mapping[str, Any]) -> bytes:
        """Play all episodes of groups and return them as JSON lines."""
        assert self._team is not None, "a player begins first"
        team, sampling = self._team, said["sampling"]
        world = team.play
        if said["set"] is not None:  # environment workers hold worlds of the run's environment alone
            world = replace(world, environment=team.config.evaluation.sets[said["set"]], workers=None)
        play = replace(
            world,
            timeline=Timeline(),
            sampling=None
            if sampling is None
            else {name: Sampling.from_row(each) for name, each in sampling.items()},
        )
        if not said["plainly"]:
            play = play.as_asked(team.algorithm.data)
        tasks = [task_from(task) for task in said["tasks"]]
        groups = run_async(lambda: rollout(play, tasks, said["samples"], said["seed"], own=said["own"]))
        return dump_groups(0, groups)


def _answered(work: Any, *given: Any) -> bytes:
    try:
        return bytes(work(*given))
    except Exception as error:  # noqa: BLE001 - the trainer, which waits for the answer, raises it again
        return json.dumps({"error": sent_error(error)}).encode()
