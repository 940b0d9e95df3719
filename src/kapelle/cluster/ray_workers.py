"""Manage rollout workers on a cluster, which are actors that roll out whole groups of episodes for a rank of the trainer.

Groups are assigned to the workers in turn. The result of a group depends only on its task, its seed and the weights. If a worker
dies, a new worker receives the current weights and repeats the same groups with the same result. With `training.asynchronous`, each
new group goes to the worker with the fewest groups, and results also depend on time.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.algorithm import Data
from kapelle.cluster.actors import (
    ActorCall,
    ActorConnection,
    ActorLost,
    StartedWorker,
    Waiting,
    answer_or_error,
    check_hashes,
    read_answer,
    settle_in,
    start_settings,
)
from kapelle.cluster.placement import RayPlacement, RolloutPlace, placement_here
from kapelle.cluster.sampling import sampled_by_pools
from kapelle.cluster.scoring import RayScorers
from kapelle.cluster.worlds import HeldByActor
from kapelle.engines.rollout.protocol import Completion, Renderer, Request
from kapelle.errors import ConfigError, EngineError, KapelleError
from kapelle.rollout.continuous import ContinuousRollouts
from kapelle.rollout.episodes import CollectsGroups, rollout
from kapelle.rollout.partial import Exchange, GroupKey, PartialGroup, Wanted, dump_wanted, load_wanted
from kapelle.rollout.replica import Elsewhere, TeamReplica, moves
from kapelle.rollout.setup import RolloutSetup
from kapelle.rollout.workers.pool import HeldHere, Hold
from kapelle.runs.episode_json import dump_groups, load_groups
from kapelle.runs.timeline import Timeline
from kapelle.runtime.event_loop import LoopThread, run_async
from kapelle.runtime.randomness import capture_random, random_as_lists, random_from_lists, restore_random
from kapelle.runtime.ranks import Ranks
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

NAME = "A rollout worker"


@dataclass(slots=True, eq=False)
class _RayWorker:
    """A rollout worker, with its index, the actor that runs it, and the versions of the weights that the actor has."""

    place: RolloutPlace
    started: StartedWorker | None = None
    not_before: float = 0.0
    """Earliest time at which the worker may be started again."""
    has: dict[str, int] = field(default_factory=dict)
    """Mapping from each policy to the number of the weights that were last sent to the worker."""


@dataclass(slots=True, eq=False)
class _Share:
    """The groups that one worker rolls out in a step."""

    place: int
    """Index of the worker that rolls out the groups, if this worker has joined."""
    request: Mapping[str, Any]
    worker: _RayWorker | None = None
    started: StartedWorker | None = None
    """The actor that received the request."""
    call: ActorCall | None = None
    answer: list[bytes] | None = None


def players_on(
    prepared: PreparedRun,
    hashes: Mapping[str, str],
    models: Mapping[str, LanguageModel],
    engine: TrainEngine,
    ranks: Ranks,
    closing: ExitStack,
) -> tuple[RayWorkers | None, Hold, RayScorers | None, Mapping[str, str]]:
    """Start the workers of this rank on the bundles that Ray has reserved, and return them.

    The result consists of the rollout workers or None, the holder of the rank's environment processes, the scoring workers or None,
    and the hashes of all base models. The hashes of base models that only scoring workers hold are added to `hashes`. The exit stack
    `closing` ends the workers. The other arguments are described in `RayWorkers`.
    """
    placed = placement_here()
    assert placed is not None, "Ray has placed this rank"
    config, team, bundles = prepared.config, prepared.team, placed.bundles
    player: RayWorkers | None = None
    hold: Hold = HeldHere
    connection: ActorConnection | None = None
    in_memory = [path for path in team.bases.values() if path in prepared.given]
    if bundles.rollout and in_memory:
        raise ConfigError(
            f"Rollout workers read models from disk, but the model '{in_memory[0]}' is in the trainer's memory. Save it and "
            "set `model.path` to its folder, or set `ray.rollout_workers: 0`."
        )
    if bundles.rollout or bundles.worlds or bundles.scoring:
        connection = ActorConnection.join(placed.address, placed.group, placed.namespace)
        closing.callback(connection.leave)
    scorers = None
    if config.ray.scoring_workers and split_scored(team)[1].bases:
        scorers = RayScorers(connection, bundles.scoring, prepared, models, engine, ranks)
        closing.callback(scorers.close)
    if connection is not None and bundles.rollout:
        player = RayWorkers(connection, placed, config, team, hashes, models, engine)
    elif connection is not None and bundles.worlds:
        hold = partial(HeldByActor, connection, bundles.worlds, config.ray.environment, str(Path.cwd()))
    if scorers is not None:  # all workers load their models at the same time
        hashes = scorers.hashes(hashes)
    return player, hold, scorers, hashes


class RayWorkers(CollectsGroups):
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
        """Start the workers. After the start, the workers load their models.

        The argument `team` contains the paths of the base models, `hashes` contains the hashes of their weights, and `engine` holds
        all policies.
        """
        self._config, self._team, self._hashes, self._models = config, team, dict(hashes), models
        self._start_settings = {**start_settings(config, team.bases), "group": placed.group}
        self._connection = connection
        self._weights: dict[str, tuple[int, object]] = {}
        """Mapping from each policy to its latest stored weights and their number, starting from 1."""
        self._waiting = Waiting("rollout worker", "ray.rollout", config.ray.timeout)
        self._under_way: list[_Share] = []
        """Shares of groups that were requested but not yet collected."""
        self._rolls_out: dict[GroupKey, int] = {}
        """Mapping from each group that is rolled out without interruption to the index of its worker."""
        for name, policy in team.policies.items():
            if moves(policy):
                self.load(name, engine.weights(name), 0)
        self._workers = [_RayWorker(place) for place in placed.bundles.rollout]
        for worker in self._workers:
            self._start(worker)

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that the workers hold."""
        return tuple(self._team.policies)

    def renderer(self, policy: str) -> Renderer:
        """Return the renderer that converts a policy's conversations to tokens."""
        return self._models[self._team.policies[policy].base].renderer

    async def generate(self, request: Request) -> Completion:
        """Raise EngineError, because the workers only roll out whole groups."""
        raise EngineError(
            f"Rollout workers sample whole groups, but '{request.agent}' needs a single completion. Set `ray.rollout_workers: 0`."
        )

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """Store new weights of a policy. Each worker receives them with its next request."""
        tensors: Any = weights
        number = self._weights[policy][0] + 1 if policy in self._weights else 1
        stored = self._connection.store(packed({"policy": policy, "version": version}, tensors))
        self._weights[policy] = (number, stored)

    @property
    def weights(self) -> Mapping[str, Mapping[str, Any]]:
        """See `CollectsGroups`. The result is a copy from the cluster's object store."""
        return {
            name: unpacked(self._connection.fetch(stored))[1] for name, (_, stored) in self._weights.items()
        }

    def release_caches(self) -> None:
        """Do nothing, because workers release their caches after every request."""

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers:
            if worker.started is not None:
                worker.started.actor.end()
                worker.started = None

    def request_groups(
        self, setup: RolloutSetup, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
    ) -> Callable[[], list[Group]]:
        """Request the rollout of groups, and return a function that waits for them; see `rollout.episodes.CollectsGroups`.

        The returned function raises the error of a worker, StopRequested if a stop was requested, or EngineError if workers die
        repeatedly.
        """
        sampling = setup.sampling
        sets = self._config.evaluation.sets
        request = {
            "random": random_as_lists(capture_random()),
            # The worker has the same settings: it uses its own environment of this name, or the run's.
            "set": next((name for name, each in sets.items() if each is setup.environment), None),
            "tasks": [task_form(task) for task in tasks],
            "samples": samples,
            "seed": seed,
            "plainly": setup.data == Data(),
            "sampling": None if sampling is None else {name: asdict(each) for name, each in sampling.items()},
        }
        count = len(self._workers)
        shares = [_Share(k, {**request, "own": list(own[k::count])}) for k in range(count) if own[k::count]]
        collect = self._request(setup.timeline, shares)

        def wait() -> list[Group]:
            found: dict[int, Group] = {}
            for share, rows in zip(shares, collect(), strict=True):
                found |= zip(share.request["own"], load_groups(map(json.loads, rows)), strict=True)
            return [found[place] for place in own]

        return wait

    def exchange(self, wanted: Wanted, *, unfinished: bool = False, seconds: float = 0.0) -> Exchange:
        """Divide groups among the workers, and return those that are finished; see `CollectsGroups`.

        A new group is rolled out by the worker with the fewest groups.
        """
        own: list[dict[GroupKey, PartialGroup]] = [{} for _ in self._workers]
        self._rolls_out = {key: place for key, place in self._rolls_out.items() if key in wanted}
        for key, place in self._rolls_out.items():
            own[place][key] = wanted[key]
        for key in sorted(wanted.keys() - self._rolls_out.keys()):
            place = self._rolls_out[key] = min(range(len(own)), key=lambda k: len(own[k]))
            own[place][key] = wanted[key]
        request = {"tasks": [], "unfinished": unfinished, "seconds": seconds}
        shares = [_Share(k, {**request, "wanted": dump_wanted(groups)}) for k, groups in enumerate(own)]
        finished: dict[GroupKey, PartialGroup] = {}
        left: dict[GroupKey, PartialGroup] = {}
        for rows in self._request(Timeline(), shares)():
            finished |= load_wanted(json.loads(rows[0]))
            left |= load_wanted(json.loads(rows[1]))
        return Exchange(finished, left)

    def _request(self, timeline: Timeline, shares: Sequence[_Share]) -> Callable[[], list[list[bytes]]]:
        """Send the requests, and return a function that waits for the results of each share.

        The returned function sets the global random generators to the final states of the worker that processed the first share.
        """
        self._under_way += shares
        self._send(shares)

        def wait() -> list[list[bytes]]:
            timeline.enter("generate")
            try:
                self._gather(shares)
            except BaseException:
                self._abandon()
                raise
            finally:
                timeline.leave()
            self._under_way = [share for share in self._under_way if share not in shares]
            answers = [share.answer for share in shares if share.answer is not None]
            if answers and answers[0][0]:
                restore_random(random_from_lists(json.loads(answers[0][0])["random"]))
            return [rows for _, *rows in answers]

        return wait

    def _abandon(self) -> None:
        """End the workers that are still processing a request."""
        for share in self._under_way:
            worker = share.worker
            if share.answer is None and worker is not None and worker.started is not None:
                worker.started.actor.end()
                worker.started = None
        self._under_way = []

    def _send(self, shares: Sequence[_Share]) -> None:
        """Send the requests that no running worker has received."""
        for share in shares:
            if share.call is not None or share.answer is not None:
                continue
            worker = share.worker = self._worker_for(share.place)
            started = share.started = worker.started
            assert started is not None, "the worker was started"
            new = {name: held for name, held in self._weights.items() if worker.has.get(name) != held[0]}
            text = json.dumps(encode(share.request, "tasks")).encode()
            share.call = started.actor.call("play", text, *(stored for _, stored in new.values()))
            worker.has |= {name: number for name, (number, _) in new.items()}

    def _worker_for(self, place: int) -> _RayWorker:
        """Return the worker with this index, or another worker if this worker has not joined yet.

        The shares do not depend on the number of workers that have joined, so batches and even the last bits of log-probs stay the
        same.
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
        """Return whether a worker that may join at any time has joined the run and loaded its models."""
        started = worker.started
        if started is not None and started.beginning is not None and started.has_begun:
            try:
                self._check_bases(started)
                self._log("a worker has joined")
            except ActorLost as lost:  # wait for another one
                self._log(f"a worker left before its first episode ({lost})")
                self._start(worker)
            except KapelleError as error:  # the run continues without this machine
                started.actor.end()
                worker.started = None
                worker.not_before = time.monotonic() + self._config.ray.timeout
                self._log(f"a worker that joined cannot roll out episodes: {error}")
        return worker.started is not None and worker.started.beginning is None

    def _log(self, what: str) -> None:
        there = sum(
            worker.started is not None and worker.started.beginning is None for worker in self._workers
        )
        logging.getLogger(__name__).warning(
            "kapelle: Rollout workers: %s; %d of %d are ready.", what, there, len(self._workers)
        )

    def _check_bases(self, started: StartedWorker) -> None:
        """Raise ConfigError if a worker has loaded different models than the trainer."""
        if started.beginning is not None:
            found = json.loads(read_answer(started.beginning, NAME))["hashes"]
            check_hashes("rollout worker", "the trainer", self._hashes, found, self._team.bases)
            started.beginning = started.up = None

    def _gather(self, shares: Sequence[_Share]) -> None:
        """Wait until every share has a result. If a worker dies, its request is sent again."""
        while waiting := [share for share in shares if share.answer is None]:
            self._send(waiting)
            calls = [share.call for share in waiting if share.call is not None]
            first = self._waiting.first(
                [share.started for share in waiting if share.started is not None], calls
            )
            for share in waiting:
                if first is None or share.call is not first:
                    continue
                worker, started = share.worker, share.started
                assert worker is not None, "the request was sent"
                assert started is not None, "the request was sent"
                try:
                    self._check_bases(started)
                    share.answer = read_answer(first, NAME).splitlines()
                    self._waiting.answered()
                except ActorLost as lost:
                    share.call = None
                    if worker.started is not started:  # its death was already noticed with another share
                        continue
                    worker.started = None
                    if worker.place.bundle is None:
                        self._log(
                            f"a worker that had joined has left ({lost}); other workers take over its groups"
                        )
                    self._waiting.died(lost)

    def _start(self, worker: _RayWorker) -> None:
        actor = self._connection.actor(RayPlayer, worker.place.bundle, self._config.ray.rollout)
        settings = {
            **self._start_settings,
            "worlds": worker.place.worlds,
            "samplers": worker.place.samplers,
        }
        worker.started = StartedWorker.of(actor, json.dumps(settings).encode())
        worker.has = {}


# -------- The actor


class RayPlayer:
    """The actor of a rollout worker, which contains a team and rolls out episodes."""

    def __init__(self) -> None:
        self._team: TeamReplica | None = None
        self._loop: LoopThread | None = None
        self._continuous: ContinuousRollouts | None = None

    def here(self) -> None:
        """Do nothing. If the call returns, the actor is running."""

    def begin(self, start_with: bytes) -> bytes:
        """Build the team from `start_settings` in JSON, and return the hashes of its base models."""
        settings = json.loads(start_with)
        settle_in(self, settings)
        return answer_or_error(self._begin, settings)

    def _begin(self, settings: Mapping[str, Any]) -> bytes:
        import torch

        hold: Hold = HeldHere
        if settings["worlds"]:
            connection = ActorConnection.of_actor(settings["group"])
            takes = Resources.model_validate(settings["config"]["ray"]["environment"])
            hold = partial(HeldByActor, connection, settings["worlds"], takes, settings["folder"])
        elsewhere: Elsewhere | None = None
        if settings["samplers"]:
            connection = ActorConnection.of_actor(settings["group"])
            elsewhere = partial(sampled_by_pools, connection, settings)
        threads = torch.get_num_threads()
        self._team = TeamReplica(settings["config"], settings["bases"], threads, hold, elsewhere)
        return json.dumps({"hashes": self._team.hashes}).encode()

    def play(self, request: bytes, *weights: bytes) -> bytes:
        """Load new weights and roll out groups.

        The result contains the states of the random generators afterwards, and the groups as JSON lines.
        """
        return answer_or_error(self._play, request, weights)

    def _play(self, request: bytes, weights: Sequence[bytes]) -> bytes:
        assert self._team is not None, "a player begins first"
        team, wanted = self._team, decode(json.loads(request))
        if team.config.training.asynchronous:
            return self._without_interruption(team, wanted, weights)
        _load(team, weights)
        restore_random(random_from_lists(wanted["random"]))
        groups = run_async(self._whole_groups(team, wanted))
        drawn = json.dumps({"random": random_as_lists(capture_random())}).encode()
        team.setup.engine.release_caches()  # a new worker has no caches, and results must not depend on them
        return drawn + b"\n" + dump_groups(0, groups)

    def _without_interruption(
        self, team: TeamReplica, wanted: Mapping[str, Any], weights: Sequence[bytes]
    ) -> bytes:
        """Process a request on a thread on which groups of training steps are rolled out without interruption."""
        if self._loop is None:
            self._loop = LoopThread()
            self._loop.__enter__()
        load = partial(_load, team, weights) if weights else None

        async def work() -> bytes:
            if self._continuous is None:
                self._continuous = ContinuousRollouts(
                    team.continuous_setup, team.config.training.tasks_per_step
                )
            if "wanted" not in wanted:  # an evaluation
                await self._continuous.load(load)
                return b"\n" + dump_groups(0, await self._whole_groups(team, wanted)())
            found = await self._continuous.exchange(
                load_wanted(wanted["wanted"]),
                load,
                unfinished=wanted["unfinished"],
                seconds=wanted["seconds"],
            )
            rows = [json.dumps(dump_wanted(groups)) for groups in found]
            return "\n".join(["", *rows]).encode()

        return self._loop.begin(work).result()

    def _whole_groups(
        self, team: TeamReplica, wanted: Mapping[str, Any]
    ) -> Callable[[], Coroutine[Any, Any, list[Group]]]:
        """Return a function that rolls out all episodes of groups."""
        sampling, setup = wanted["sampling"], replace(team.setup, timeline=Timeline())
        if wanted["set"] is not None:  # environment workers hold only the run's environment
            setup = replace(setup, environment=team.config.evaluation.sets[wanted["set"]], workers=None)
        rows = sampling and {name: Sampling.from_row(each) for name, each in sampling.items()}
        setup = replace(setup, sampling=rows)
        if not wanted["plainly"]:
            setup = replace(setup, data=team.algorithm.data)
        tasks = [task_from(task) for task in wanted["tasks"]]
        return partial(rollout, setup, tasks, wanted["samples"], wanted["seed"], own=wanted["own"])


def _load(team: TeamReplica, weights: Sequence[bytes]) -> None:
    for data in weights:
        plain, tensors = unpacked(data)
        team.setup.engine.load(plain["policy"], tensors, plain["version"])
