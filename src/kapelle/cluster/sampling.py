"""Sampling workers on a cluster: actors that hold the models of some agents (`ray.pools`), and sample for the workers that play.

So the models of one team lie on different machines. A worker that plays sends all requests that have arrived once nobody can go on
without an answer, of all pools at once, and waits for them as it waits for its own models: batches then depend on the episodes alone,
never on time. A sampling worker takes one batch after another, and keeps nothing between two of them but weights.
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
    check_hashes,
    settle_in,
)
from kapelle.engines.rollout.protocol import Completion, Renderer, Request, RolloutEngine
from kapelle.engines.rollout.request_queue import RequestQueue, wait_for_requests
from kapelle.runs.episode_json import b64
from kapelle.runtime.batch_barrier import BatchBarrier, batch_barrier
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.foreign_code import received_error, sent_error
from kapelle.runtime.tensors import packed, unpacked
from kapelle.setup.team_builder import build_algorithm, build_team, pools_of
from kapelle.types import Constraint, Image, Message, Routing, Sampling, Task

if TYPE_CHECKING:
    from kapelle.engines.rollout.protocol import EngineSettings
    from kapelle.settings.schema import RunConfig
    from kapelle.team import Team

AGAIN = 0.2
"""Seconds until one that has died is asked for again: Ray forgets its name meanwhile."""
PATIENCE = 60.0
"""Seconds for which busy worlds are waited for where the engine's settings name none (`engine.patience`)."""


@dataclass(slots=True, eq=False)
class _AskedPool:
    """The worker of one pool that this process asks."""

    name: str
    bundle: int
    policies: tuple[str, ...]
    waiting: Waiting
    actor: Actor | None = None
    beginning: ActorCall | None = None
    """Hashes of the bases that it has read, until they are compared."""


@dataclass(slots=True, eq=False)
class _Batch:
    """Requests that a pool was asked for."""

    pool: _AskedPool
    places: list[int]
    question: bytes
    asked: ActorCall | None = None
    answers: list[Completion] = field(default_factory=list)


def sampled_by_pools(
    connection: ActorConnection, said: Mapping[str, Any], config: RunConfig, team: Team
) -> tuple[PooledEngine, dict[str, str]]:
    """Return the engine of all policies that pools hold, and the hashes of their bases; `said` is what a worker that plays begins with."""
    engine = PooledEngine(connection, said, config, team)
    return engine, engine.begin()


class PooledEngine(RolloutEngine):
    """Samples by asking the workers of pools; see `RolloutEngine`."""

    def __init__(
        self, connection: ActorConnection, said: Mapping[str, Any], config: RunConfig, team: Team
    ) -> None:
        """Take one worker of each pool on the bundle that `said` names, started if no other process has."""
        self._connection, self._said, self._config, self._team = connection, said, config, team
        held = pools_of(config, team)
        self._pools = [
            _AskedPool(
                name,
                bundle,
                held[name],
                Waiting(
                    "sampling worker",
                    "sampled",
                    f"ray.pools.{name}",
                    config.ray.timeout,
                    f" of the pool '{name}'",
                ),
            )
            for name, bundle in said["samplers"]
        ]
        self._pool_of = {policy: pool for pool in self._pools for policy in pool.policies}
        self._renderers: dict[str, Renderer] = {}
        self._hashes: dict[str, str] = {}
        self._weights: dict[str, tuple[str, bytes]] = {}
        """Policy → hash of its newest weights, and these as bytes."""
        self._queue = RequestQueue[None]()
        self._pump: asyncio.Task[None] | None = None
        self._patience = float(config.engine.model_dump().get("patience", PATIENCE))

    @property
    def policies(self) -> Sequence[str]:
        """Names of the policies that pools hold."""
        return tuple(self._pool_of)

    def begin(self) -> dict[str, str]:
        """Wait until every pool's worker has loaded its models; return the hashes of their weights by base name."""
        for pool in self._pools:
            self._start(pool)
        self._gather([_Batch(pool, [], _question([], {})) for pool in self._pools])
        return dict(self._hashes)

    def renderer(self, policy: str) -> Renderer:
        """See `RolloutEngine`."""
        base = self._team.policies[policy].base
        if base not in self._renderers:
            from kapelle.models.renderer import load_renderer

            self._renderers[base] = load_renderer(self._said["bases"][base], self._config.model)
        return self._renderers[base]

    async def generate(self, request: Request) -> Completion:
        """See `RolloutEngine`."""
        if self._pump is None or self._pump.done():
            self._queue.drop_cancelled()  # what an interrupted run has left: nothing waits for it any more
            self._pump = asyncio.get_running_loop().create_task(self._drain(batch_barrier()))
        return await self._queue.answer_to(request)

    def load(self, policy: str, weights: Mapping[str, object], version: int) -> None:
        """See `RolloutEngine`; the worker gets them with the next requests, unless another process has sent the same."""
        tensors: Any = weights
        data = packed({"policy": policy, "version": version}, tensors)
        self._weights[policy] = hashlib.blake2b(data, digest_size=16).hexdigest(), data

    async def _drain(self, here: BatchBarrier) -> None:
        """Answer requests until none is left."""
        queue = self._queue
        while queue.arrived or queue.waiting:
            try:
                await wait_for_requests(here, lambda: len(queue.arrived), self._patience)
                queue.enqueue_arrived()
                queue.drop_cancelled()
                answers = self._sampled([each.request for each in queue.waiting])
            except Exception as error:  # noqa: BLE001 - passed on to the requests that wait
                queue.enqueue_arrived()
                for each in queue.waiting:
                    each.fail(error)
            else:
                for each, answer in zip(queue.waiting, answers, strict=True):
                    each.start_clock()
                    each.answer(answer)
            queue.waiting = []

    def _sampled(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the answers to requests, asked of all pools at once."""
        batches = []
        for pool in self._pools:
            places = [k for k, request in enumerate(requests) if self._pool_of[request.policy] is pool]
            if places:
                wanted = {name: self._weights[name][0] for name in pool.policies if name in self._weights}
                batches.append(_Batch(pool, places, _question([requests[k] for k in places], wanted)))
        self._gather(batches)
        found = {
            k: answer for batch in batches for k, answer in zip(batch.places, batch.answers, strict=True)
        }
        return [found[k] for k in range(len(requests))]

    def _gather(self, batches: Sequence[_Batch]) -> None:
        """Ask for batches and wait for all answers; a worker that dies is started again and asked again."""
        for batch in batches:
            assert batch.pool.actor is not None, "it was started"
            batch.asked = batch.pool.actor.ask("sample", batch.question)
        for batch in batches:
            while True:
                pool = batch.pool
                assert batch.asked is not None
                assert pool.actor is not None
                try:
                    if pool.beginning is not None:
                        self._compare(_read(pool.beginning)["hashes"])
                        pool.beginning = None
                    said = _read(batch.asked)
                    if said["lacks"]:
                        sent = [self._weights[name][1] for name in said["lacks"]]
                        batch.asked = pool.actor.ask("sample", batch.question, *sent)
                        continue
                except ActorLost as lost:
                    pool.waiting.died(lost)
                    time.sleep(AGAIN)
                    self._start(pool)
                    batch.asked = pool.actor.ask("sample", batch.question)
                else:
                    pool.waiting.answered()
                    batch.answers = [_completion(row) for row in said["answers"]]
                    break

    def _start(self, pool: _AskedPool) -> None:
        """Take the pool's worker, which runs already or is started, and let it begin."""
        name = f"{self._said['group']}-{pool.name}-{pool.bundle}"
        resources = self._config.ray.pools[pool.name].takes
        pool.actor = self._connection.actor(RaySampler, pool.bundle, resources, name=name)
        said = {**{key: self._said[key] for key in ("config", "bases", "path", "folder")}, "pool": pool.name}
        pool.beginning = pool.actor.ask("begin", json.dumps(said).encode())

    def _compare(self, hashes: Mapping[str, str]) -> None:
        check_hashes("sampling worker", "the one before it", self._hashes, hashes, self._said["bases"])


def _read(asked: ActorCall) -> Mapping[str, Any]:
    """Return a worker's answer; raises what it raised."""
    said: Mapping[str, Any] = json.loads(bytes(asked.answer()))
    if "error" in said:
        raise received_error(said["error"], "A sampling worker")
    return said


# -------- Requests and answers as JSON


def _question(requests: Sequence[Request], weights: Mapping[str, str]) -> bytes:
    """Return requests as JSON, with the hashes of the weights that are to answer them by policy; images are sent once.

    Of messages only the images are sent: workers read tokens.
    """
    images: dict[str, Image] = {}
    rows = []
    for request in requests:
        seen = [image for message in request.messages for image in message.images]
        images |= {image.hash: image for image in seen}
        rows.append(
            {
                "policy": request.policy,
                "agent": request.agent,
                "prompt_ids": request.prompt_ids,
                "sampling": asdict(request.sampling),
                "seed": request.seed,
                "sample": request.sample,
                "begun": request.begun,
                "images": [image.hash for image in seen],
            }
        )
    return json.dumps({"requests": rows, "images": image_rows(images), "weights": weights}).encode()


def _requests(said: Mapping[str, Any]) -> list[Request]:
    images = images_from(said["images"])
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
        for row in said["requests"]
    ]


def image_rows(images: Mapping[str, Image]) -> dict[str, list[str]]:
    """Return images, by their hash, as JSON that `images_from` reads."""
    return {name: [image.media, b64(image.data)] for name, image in images.items()}


def images_from(rows: Mapping[str, Sequence[str]]) -> dict[str, Image]:
    """Return the images of `image_rows`."""
    return {name: Image(name, media, base64.b64decode(data)) for name, (media, data) in rows.items()}


def beside_row(routing: Routing | None, constraint: Constraint | None) -> dict[str, Any]:
    """Return what a completion has beside its tokens as JSON that `beside_from` reads."""
    return {
        "routing": None if routing is None else [routing.layers, routing.chosen, b64(routing.data)],
        "constraint": None if constraint is None else asdict(constraint),
    }


def beside_from(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `routing` and `constraint` of `beside_row`, as keywords."""
    routing, constraint = row["routing"], row["constraint"]
    return {
        "routing": None if routing is None else Routing(routing[0], routing[1], base64.b64decode(routing[2])),
        "constraint": None if constraint is None else Constraint(**constraint),
    }


def _row(answer: Completion) -> dict[str, Any]:
    return {
        "ids": answer.ids,
        "logprobs": answer.logprobs,
        "finish_reason": answer.finish_reason,
        "text": answer.text,
        "version": answer.version,
        "weights_hash": answer.weights_hash,
        **beside_row(answer.routing, answer.constraint),
    }


def _completion(row: Mapping[str, Any]) -> Completion:
    return Completion(
        tuple(row["ids"]),
        tuple(row["logprobs"]),
        row["finish_reason"],
        row["text"],
        row["version"],
        row["weights_hash"],
        **beside_from(row),
    )


# -------- The actor


class RaySampler:
    """The actor: the models of one pool. An error is an answer (`sent_error`), so that who asks can raise the same one."""

    def __init__(self) -> None:
        self._engine: RolloutEngine | None = None
        self._hashes: dict[str, str] = {}
        self._has: dict[str, str] = {}
        """Policy → hash of the weights that it was sent."""

    def begin(self, start_with: bytes) -> bytes:
        """Load the pool's models: settings, paths of bases, pool, and what to import from, as JSON. Returns the hashes of its bases."""
        try:
            if self._engine is None:
                self._begin(json.loads(start_with))
            return json.dumps({"hashes": self._hashes}).encode()
        except Exception as error:  # noqa: BLE001 - who waits for the answer raises it again
            return json.dumps({"error": sent_error(error)}).encode()

    def _begin(self, said: Mapping[str, Any]) -> None:
        import torch

        from kapelle.models.weights import hash_of_base
        from kapelle.runtime.randomness import keep_imports_from_drawing
        from kapelle.setup.model_loading import load_models
        from kapelle.setup.recipe import resolve

        settle_in(self, said)
        torch.set_num_threads(torch.get_num_threads())
        keep_imports_from_drawing()
        config = resolve(said["config"])
        team = build_team(config, build_algorithm(config))
        policies = [team.policies[name] for name in pools_of(config, team)[said["pool"]]]
        own = {policy.base for policy in policies}
        team = replace(team, bases={base: path for base, path in said["bases"].items() if base in own})
        models = load_models(team, config.model, {})
        self._hashes = {base: hash_of_base(model) for base, model in models.items()}
        for policy in policies:
            if policy.lora is not None:
                models[policy.base].bank.add(policy.name, policy.lora, config.seed)
        self._engine = cast("EngineSettings", config.engine).build(models, policies)

    def sample(self, question: bytes, *weights: bytes) -> bytes:
        """Take weights, and return the answers to requests as JSON; or the policies of which it lacks the weights that were asked for."""
        try:
            return json.dumps(self._sample(json.loads(question), weights)).encode()
        except Exception as error:  # noqa: BLE001 - who waits for the answer raises it again
            return json.dumps({"error": sent_error(error)}).encode()

    def _sample(self, said: Mapping[str, Any], weights: Sequence[bytes]) -> dict[str, Any]:
        assert self._engine is not None, "a worker begins first"
        engine = self._engine
        for data in weights:
            plain, tensors = unpacked(data)
            engine.load(plain["policy"], tensors, plain["version"])
            self._has[plain["policy"]] = hashlib.blake2b(data, digest_size=16).hexdigest()
        lacks = [name for name, wanted in said["weights"].items() if self._has.get(name) != wanted]
        if lacks:
            return {"lacks": lacks, "answers": []}
        requests = _requests(said)

        async def answered() -> list[Completion]:
            return list(await asyncio.gather(*(engine.generate(request) for request in requests)))

        answers = run_async(answered) if requests else []
        engine.release_caches()  # what is kept would depend on what was sampled before, and a new worker has nothing
        return {"lacks": [], "answers": [_row(answer) for answer in answers]}
