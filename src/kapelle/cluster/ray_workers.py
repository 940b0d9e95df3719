"""Rollout workers as a rank of the trainer sees them: one rollout engine that plays whole groups.

Groups are dealt in turn, as ranks deal them, and what a group is played like depends on its task, its seed and the weights
alone. So a worker that dies is started anew, gets the weights of now and plays its groups again, and nothing else notices.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kapelle.cluster.actors import Actor, ActorLost, Asked, Connection, first_answered
from kapelle.cluster.placement import Placement, RolloutPlace
from kapelle.cluster.player import Player
from kapelle.cluster.worlds import held_by_actors
from kapelle.engines.rollout.protocol import Completion, Renderer, Request
from kapelle.errors import ConfigError, EngineError
from kapelle.rollout.replica import error_again, moves
from kapelle.rollout.workers.pool import HeldHere, Hold
from kapelle.rollout.workers.session import task_form
from kapelle.runs.episode_json import encode, load_groups
from kapelle.runtime.interrupts import stop_if_asked
from kapelle.runtime.randomness import capture_random, random_as_lists, random_from_lists, restore_random
from kapelle.runtime.tensors import packed
from kapelle.types import Group, Task

if TYPE_CHECKING:
    from kapelle.engines.train.protocol import TrainEngine
    from kapelle.models.language_model import LanguageModel
    from kapelle.rollout.play import Play
    from kapelle.settings.schema import RunConfig
    from kapelle.team import Team


LOOK = 0.2
"""Seconds between two looks at whether this process should stop, while it waits."""
DEATHS = 5
"""Workers in a row that may die without having answered; then the run stops."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A rollout worker: where it lives, the actor that is it now, and the weights that this one has."""

    place: RolloutPlace
    actor: Actor | None = None
    begun: float = 0.0
    """When the actor was asked for."""
    up: Asked | None = None
    """Its sign that it runs, until it is read."""
    beginning: Asked | None = None
    """What it read at its start, until it is compared."""
    has: dict[str, int] = field(default_factory=dict)
    """Policy → number of the weights that it was sent."""


@dataclass(slots=True)
class _Share:
    """Groups that a worker plays."""

    worker: _Worker
    own: Sequence[int]
    asked: Asked | None = None
    answer: list[bytes] | None = None


def players_on(
    placed: Placement,
    config: RunConfig,
    team: Team,
    hashes: Mapping[str, str],
    models: Mapping[str, LanguageModel],
    engine: TrainEngine,
    closing: ExitStack,
) -> tuple[RayWorkers | None, Hold]:
    """Return what plays for a rank that a cluster has placed: rollout workers, or else what holds its own worlds.

    What they need is released by `closing`. See `RayWorkers` for the rest.
    """
    bundles = placed.bundles
    if not bundles.rollout and not bundles.worlds:
        return None, HeldHere
    connection = Connection.join(placed.address, placed.group, placed.namespace)
    closing.callback(connection.leave)
    if not bundles.rollout:
        return None, held_by_actors(connection, bundles.worlds, config.ray.environment, str(Path.cwd()))
    return RayWorkers(connection, placed, config, team, hashes, models, engine), HeldHere


class RayWorkers:
    """The rollout workers of one rank."""

    def __init__(
        self,
        connection: Connection,
        placed: Placement,
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
        self._deaths = 0
        for name, policy in team.policies.items():
            if moves(policy):
                self.load(name, engine.weights(name), 0)
        self._workers = [_Worker(place) for place in placed.bundles.rollout]
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

    def release_caches(self) -> None:
        """Do nothing: workers keep nothing between two questions."""

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            if worker.actor is not None:
                worker.actor.end()
                worker.actor = None

    def play_groups(
        self, play: Play, tasks: Sequence[Task], samples: int, seed: int, own: Sequence[int]
    ) -> list[Group]:
        """Let the workers play; see `rollout.shared.PlaysGroups`.

        Raises what a worker raised, StopRequested, and EngineError where workers die again and again.
        """
        sampling = play.sampling
        question = {
            "random": random_as_lists(capture_random()),
            "tasks": [task_form(task) for task in tasks],
            "samples": samples,
            "seed": seed,
            "tree": play.tree is not None,
            "sampling": None if sampling is None else {name: asdict(each) for name, each in sampling.items()},
        }
        count = len(self._workers)
        shares = [_Share(worker, own[k::count]) for k, worker in enumerate(self._workers) if own[k::count]]
        play.timeline.enter("generate")
        try:
            self._gather(shares, question)
        except BaseException:
            self._give_up(shares)
            raise
        finally:
            play.timeline.leave()
        found: dict[int, Group] = {}
        for share in shares:
            assert share.answer is not None
            drawn, *rows = share.answer
            if share is shares[0]:
                restore_random(random_from_lists(json.loads(drawn)["random"]))
            found |= zip(share.own, load_groups(map(json.loads, rows)), strict=True)
        return [found[place] for place in own]

    def _gather(self, shares: Sequence[_Share], question: Mapping[str, Any]) -> None:
        """Ask every share until it is answered, each once."""
        while waiting := [share for share in shares if share.answer is None]:
            for share in waiting:
                if share.asked is None:
                    share.asked = self._ask(share, question)
            stop_if_asked()
            for share in waiting:
                self._see_that_it_runs(share.worker)
            first = first_answered([share.asked for share in waiting if share.asked is not None], LOOK)
            for share in waiting:
                if first is not None and share.asked is first:
                    self._take(share)

    def _ask(self, share: _Share, question: Mapping[str, Any]) -> Asked:
        worker = share.worker
        if worker.actor is None:
            self._start(worker)
        assert worker.actor is not None
        new = {name: held for name, held in self._weights.items() if worker.has.get(name) != held[0]}
        text = json.dumps(encode({**question, "own": list(share.own)}, "tasks")).encode()
        asked = worker.actor.ask("play", text, *(stored for _, stored in new.values()))
        worker.has |= {name: number for name, (number, _) in new.items()}
        return asked

    def _take(self, share: _Share) -> None:
        """Keep the answer of a share; where its worker has died, let another one be asked."""
        worker = share.worker
        assert share.asked is not None
        try:
            if worker.beginning is not None:
                self._check(_read(worker.beginning)[0])
                worker.beginning = None
            share.answer = _read(share.asked)
            self._deaths = 0
        except ActorLost as lost:
            share.asked = None
            worker.actor = worker.beginning = None
            self._deaths += 1
            if self._deaths >= DEATHS:
                raise EngineError(
                    f"{self._deaths} rollout workers in a row have died before they had played anything; the last one: {lost}. Look "
                    "above for what they wrote, and check the memory of their machines (`ray.rollout`)."
                ) from None

    def _see_that_it_runs(self, worker: _Worker) -> None:
        """Raise EngineError for a worker that the cluster does not find room for; its machine may be gone."""
        if worker.up is None:
            return
        if first_answered([worker.up], 0.0) is not None:
            worker.up = None
        elif time.monotonic() - worker.begun > self._config.ray.timeout:
            raise EngineError(
                f"A rollout worker has not started within {self._config.ray.timeout:g} s (`ray.timeout`): the machine that it "
                "was placed on is gone, or has no room any more. Resume the run."
            )

    def _start(self, worker: _Worker) -> None:
        worker.actor = self._connection.actor(Player, worker.place.bundle, self._config.ray.rollout)
        worker.begun, worker.up = time.monotonic(), worker.actor.ask("here")
        said = {**self._begin_with, "worlds": worker.place.worlds}
        worker.beginning = worker.actor.ask("begin", json.dumps(said).encode())
        worker.has = {}

    def _check(self, begun: bytes) -> None:
        for base, found in json.loads(begun)["hashes"].items():
            if found != self._hashes[base]:
                raise ConfigError(
                    f"A rollout worker has read other weights for '{self._bases[base]}' ({found}) than the trainer "
                    f"({self._hashes[base]}). Put the same files under this path on all machines."
                )

    def _give_up(self, shares: Sequence[_Share]) -> None:
        """End the workers that still play what nobody waits for."""
        for share in shares:
            if share.answer is None and share.worker.actor is not None:
                share.worker.actor.end()
                share.worker.actor = share.worker.beginning = None


def _read(asked: Asked) -> list[bytes]:
    """Return the lines of a worker's answer; raises what it raised."""
    lines = bytes(asked.answer()).splitlines()
    head = json.loads(lines[0])
    if "error" in head:
        raise error_again(head, "A rollout worker")
    return lines
