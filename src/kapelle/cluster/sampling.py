"""Manage sampling workers on a cluster, which are actors that hold the models of some agents (`ray.pools`) and sample for rollout workers.

With sampling workers, the models of one team can be on different machines. A rollout worker waits until none of its episodes can
continue without a completion, and then sends one batch of requests to each pool. Batches therefore depend only on the episodes and
not on timing. Between two batches, a sampling worker keeps no data except its weights.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from kapelle.cluster.actors import (
    Actor,
    ActorCall,
    ActorConnection,
    ActorLost,
    Waiting,
    answer_or_error,
    check_hashes,
    read_answer,
    settle_in,
)
from kapelle.engines.rollout.protocol import Completion, Renderer, Request, RolloutEngine
from kapelle.engines.rollout.request_queue import RequestQueue, wait_for_requests
from kapelle.runs.episode_json import b64
from kapelle.runtime.batch_barrier import BatchBarrier, batch_barrier
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.tensors import packed, unpacked
from kapelle.setup.team_builder import build_algorithm, build_team, pools_of
from kapelle.types import Constraint, Image, Message, Routing, Sampling, Task

if TYPE_CHECKING:
    from kapelle.engines.rollout.protocol import EngineSettings
    from kapelle.settings.schema import RunConfig
    from kapelle.team import Team

NAME = "A sampling worker"
AGAIN = 0.2
"""Time in seconds until a dead worker is restarted, so that Ray can release its name."""
PATIENCE = 60.0
"""Time in seconds to wait for busy environments. This is the default of `engine.patience`, for engines without this setting."""


@dataclass(slots=True, eq=False)
class _Pool:
    """A pool of models, and its worker that samples for this process."""

    name: str
    bundle: int
    policies: tuple[str, ...]
    waiting: Waiting
    actor: Actor | None = None
    beginning: ActorCall | None = None
    """The call that loads the models of the worker, or None after the hashes of the models were compared."""


@dataclass(slots=True, eq=False)
class _Batch:
    """A batch of requests that is sent to one pool."""

    pool: _Pool
    places: list[int]
    requests: bytes
    call: ActorCall | None = None
    answers: list[Completion] = field(default_factory=list)


def sampled_by_pools(
    connection: ActorConnection, settings: Mapping[str, Any], config: RunConfig, team: Team
) -> tuple[PooledEngine, dict[str, str]]:
    """Return the engine of all policies in pools, and the hashes of their base models.

    The argument `settings` contains the settings of the rollout worker.
    """
    engine = PooledEngine(connection, settings, config, team)
    return engine, engine.begin()


class PooledEngine(RolloutEngine):
    """A `RolloutEngine` that samples with the workers of pools."""

    def __init__(
        self, connection: ActorConnection, settings: Mapping[str, Any], config: RunConfig, team: Team
    ) -> None:
        """Use one worker of each pool, on the bundle given in `settings`.

        The worker is started unless another process has already started it.
        """
        self._connection, self._settings, self._config, self._team = connection, settings, config, team
        policies = pools_of(config, team)
        self._pools = []
        for name, bundle in settings["samplers"]:
            of, limit = f" of the pool '{name}'", config.ray.timeout
            waiting = Waiting("sampling worker", f"ray.pools.{name}", limit, of)
            self._pools.append(_Pool(name, bundle, policies[name], waiting))
        self._pool_of = {policy: pool for pool in self._pools for policy in pool.policies}
        self._renderers: dict[str, Renderer] = {}
        self._hashes: dict[str, str] = {}
        self._weights: dict[str, tuple[str, bytes]] = {}
        """Mapping from each policy to the hash and the bytes of its latest weights."""
        self._queue = RequestQueue[None]()
        self._pump: asyncio.Task[None] | None = None
        self._patience = float(config.engine.model_dump().get("patience", PATIENCE))

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies in pools."""
        return tuple(self._pool_of)

    def begin(self) -> dict[str, str]:
        """Wait until the worker of every pool has loaded its models, and return the hashes of their weights by base model name."""
        for pool in self._pools:
            self._start(pool)
        self._gather([_Batch(pool, [], _dumped([], {})) for pool in self._pools])
        return dict(self._hashes)

    def renderer(self, policy: str) -> Renderer:
        """See `RolloutEngine`."""
        base = self._team.policies[policy].base
        if base not in self._renderers:
            from kapelle.models.renderer import load_renderer

            self._renderers[base] = load_renderer(self._settings["bases"][base], self._config.model)
        return self._renderers[base]

    async def generate(self, request: Request) -> Completion:
        """See `RolloutEngine`."""
        if self._pump is None or self._pump.done():
            self._queue.drop_cancelled()  # no caller waits for the requests of an interrupted run
            self._pump = asyncio.get_running_loop().create_task(self._drain(batch_barrier()))
        return await self._queue.answer_to(request)

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """See `RolloutEngine`. If the worker does not have these weights, it receives them with the next requests."""
        tensors: Any = weights
        data = packed({"policy": policy, "version": version}, tensors)
        self._weights[policy] = hashlib.blake2b(data, digest_size=16).hexdigest(), data

    async def _drain(self, here: BatchBarrier) -> None:
        """Answer requests until no request is left."""
        queue = self._queue
        while queue.arrived or queue.waiting:
            try:
                await wait_for_requests(here, lambda: len(queue.arrived), self._patience)
                queue.enqueue_arrived()
                queue.drop_cancelled()
                answers = self._sample([each.request for each in queue.waiting])
            except Exception as error:  # noqa: BLE001 - the waiting requests raise it
                queue.enqueue_arrived()
                for each in queue.waiting:
                    each.fail(error)
            else:
                for each, answer in zip(queue.waiting, answers, strict=True):
                    each.start_clock()
                    each.answer(answer)
            queue.waiting = []

    def _sample(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions of requests. All pools sample at the same time."""
        batches = []
        for pool in self._pools:
            places = [k for k, request in enumerate(requests) if self._pool_of[request.policy] is pool]
            if places:
                wanted = {name: self._weights[name][0] for name in pool.policies if name in self._weights}
                batches.append(_Batch(pool, places, _dumped([requests[k] for k in places], wanted)))
        self._gather(batches)
        found = {
            k: answer for batch in batches for k, answer in zip(batch.places, batch.answers, strict=True)
        }
        return [found[k] for k in range(len(requests))]

    def _gather(self, batches: Sequence[_Batch]) -> None:
        """Send batches and wait for all results. If a worker dies, a new worker is started and the batch is sent again."""
        for batch in batches:
            assert batch.pool.actor is not None, "it was started"
            batch.call = batch.pool.actor.call("sample", batch.requests)
        for batch in batches:
            while True:
                pool = batch.pool
                assert batch.call is not None
                assert pool.actor is not None
                try:
                    if pool.beginning is not None:
                        hashes, paths = json.loads(read_answer(pool.beginning, NAME)), self._settings["bases"]
                        check_hashes("sampling worker", "the one before it", self._hashes, hashes, paths)
                        pool.beginning = None
                    answer = json.loads(read_answer(batch.call, NAME))
                    if answer["lacks"]:
                        sent = [self._weights[name][1] for name in answer["lacks"]]
                        batch.call = pool.actor.call("sample", batch.requests, *sent)
                        continue
                except ActorLost as lost:
                    pool.waiting.died(lost)
                    time.sleep(AGAIN)
                    self._start(pool)
                    batch.call = pool.actor.call("sample", batch.requests)
                else:
                    pool.waiting.answered()
                    batch.answers = [_completion(row) for row in answer["answers"]]
                    break

    def _start(self, pool: _Pool) -> None:
        """Start the worker of a pool, or use the worker that is already running, and let it load its models."""
        name = f"{self._settings['group']}-{pool.name}-{pool.bundle}"
        resources = self._config.ray.pools[pool.name].takes
        pool.actor = self._connection.actor(RaySampler, pool.bundle, resources, name=name)
        own = {key: self._settings[key] for key in ("config", "bases", "path", "folder")}
        pool.beginning = pool.actor.call("begin", json.dumps({**own, "pool": pool.name}).encode())


# -------- Requests and answers as JSON


def _dumped(requests: Sequence[Request], weights: Mapping[str, str]) -> bytes:
    """Return requests as JSON, with the hash of the weights of each policy that must sample their completions.

    Workers read tokens and not messages. Only the images of messages are sent, and each image only once.
    """
    images: dict[str, Image] = {}
    rows = []
    for request in requests:
        own = [image for message in request.messages for image in message.images]
        images |= {image.hash: image for image in own}
        rows.append(
            {
                "policy": request.policy,
                "agent": request.agent,
                "prompt_ids": request.prompt_ids,
                "sampling": asdict(request.sampling),
                "seed": request.seed,
                "sample": request.sample,
                "begun": request.begun,
                "images": [image.hash for image in own],
            }
        )
    return json.dumps({"requests": rows, "images": image_rows(images), "weights": weights}).encode()


def _requests(sent: Mapping[str, Any]) -> list[Request]:
    images = images_from(sent["images"])
    return [
        Request(
            row["policy"],
            row["agent"],
            tuple(Message("user", "", images=(images[name],)) for name in row["images"]),
            tuple(row["prompt_ids"]),
            Sampling.from_row(row["sampling"]),
            row["seed"],
            Task("", ""),
            row["sample"],
            tuple(row["begun"]),
        )
        for row in sent["requests"]
    ]


def image_rows(images: Mapping[str, Image]) -> dict[str, list[str]]:
    """Return images as a JSON object with their hashes as keys, which `images_from` reads."""
    return {name: [image.media, b64(image.data)] for name, image in images.items()}


def images_from(rows: Mapping[str, Sequence[str]]) -> dict[str, Image]:
    """Return the images from a JSON object that `image_rows` returned."""
    return {name: Image(name, media, base64.b64decode(data)) for name, (media, data) in rows.items()}


def beside_row(routing: Routing | None, constraint: Constraint | None) -> dict[str, Any]:
    """Return the routing and the constraint of a completion as a JSON object, which `beside_from` reads."""
    return {
        "routing": None if routing is None else [routing.layers, routing.chosen, b64(routing.data)],
        "constraint": None if constraint is None else asdict(constraint),
    }


def beside_from(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments `routing` and `constraint` from a JSON object that `beside_row` returned."""
    routing, constraint = row["routing"], row["constraint"]
    return {
        "routing": None if routing is None else Routing(routing[0], routing[1], base64.b64decode(routing[2])),
        "constraint": None if constraint is None else Constraint(**constraint),
    }


_FIELDS = ("ids", "logprobs", "finish_reason", "text", "version", "weights_hash")
"""Fields of a completion that can be converted to JSON."""


def _row(answer: Completion) -> dict[str, Any]:
    row = {name: getattr(answer, name) for name in _FIELDS}
    return {**row, **beside_row(answer.routing, answer.constraint)}


def _completion(row: Mapping[str, Any]) -> Completion:
    plain = {name: row[name] for name in _FIELDS}
    lists = {name: tuple(row[name]) for name in ("ids", "logprobs")}
    return Completion(**{**plain, **lists}, **beside_from(row))


# -------- The actor


class RaySampler:
    """The actor of a sampling worker, which holds the models of one pool."""

    def __init__(self) -> None:
        self._engine: RolloutEngine | None = None
        self._hashes: dict[str, str] = {}
        self._has: dict[str, str] = {}
        """Mapping from each policy to the hash of the weights that were last sent to the actor."""

    def begin(self, start_with: bytes) -> bytes:
        """Load the models of the pool with `start_settings` in JSON, and return the hashes of its base models."""

        def work() -> bytes:
            if self._engine is None:
                self._begin(json.loads(start_with))
            return json.dumps(self._hashes).encode()

        return answer_or_error(work)

    def _begin(self, settings: Mapping[str, Any]) -> None:
        from kapelle.models.weights import hash_of_base
        from kapelle.setup.model_loading import load_models

        config = settled_config(self, settings)
        team = build_team(config, build_algorithm(config))
        policies = [team.policies[name] for name in pools_of(config, team)[settings["pool"]]]
        own = {policy.base for policy in policies}
        team = replace(team, bases={base: path for base, path in settings["bases"].items() if base in own})
        models = load_models(team, config.model, {})
        self._hashes = {base: hash_of_base(model) for base, model in models.items()}
        for policy in policies:
            if policy.lora is not None:
                models[policy.base].bank.add(policy.name, policy.lora, config.seed)
        self._engine = cast("EngineSettings", config.engine).build(models, policies)

    def sample(self, requests: bytes, *weights: bytes) -> bytes:
        """Load weights, and return the completions of requests as JSON.

        If the weights of policies are missing, return the names of these policies instead.
        """
        return answer_or_error(lambda: json.dumps(self._sample(json.loads(requests), weights)).encode())

    def _sample(self, sent: Mapping[str, Any], weights: Sequence[bytes]) -> dict[str, Any]:
        assert self._engine is not None, "a worker begins first"
        engine = self._engine
        for data in weights:
            plain, tensors = unpacked(data)
            engine.load(plain["policy"], tensors, plain["version"])
            self._has[plain["policy"]] = hashlib.blake2b(data, digest_size=16).hexdigest()
        lacks = [name for name, wanted in sent["weights"].items() if self._has.get(name) != wanted]
        if lacks:
            return {"lacks": lacks, "answers": []}
        requests = _requests(sent)

        async def answered() -> list[Completion]:
            return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

        answers = run_async(answered) if requests else []
        engine.release_caches()  # a new worker has no caches, and results must not depend on them
        return {"lacks": [], "answers": [_row(answer) for answer in answers]}


def settled_config(actor: object, settings: Mapping[str, Any]) -> RunConfig:
    """Prepare the process of an actor that holds models (see `settle_in`), and return the configuration of the run."""
    import torch

    from kapelle.runtime.randomness import keep_imports_from_drawing
    from kapelle.setup.recipe import resolve

    settle_in(actor, settings)
    torch.set_num_threads(torch.get_num_threads())
    keep_imports_from_drawing()
    return resolve(settings["config"])
