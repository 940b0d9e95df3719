"""Manage scoring workers on a cluster, which are actors that hold models used only for scoring, and score the turns of a step.

Models that are used only for scoring neither act nor learn, such as verifiers, teachers and embedding models (`team.split_scored`). A
worker builds a train engine of the type in the recipe with only these models. Samples are assigned to workers in the same way as to
ranks. If the number of workers equals the number of ranks, the results are bitwise identical to the results without workers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.cluster.actors import (
    ActorConnection,
    ActorLost,
    StartedWorker,
    Waiting,
    answer_or_error,
    check_hashes,
    read_answer,
    start_settings,
)
from kapelle.cluster.sampling import beside_from, beside_row, image_rows, images_from, settled_config
from kapelle.errors import ConfigError
from kapelle.rows import Learners, Reader, Sample
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.runtime.ranks import Ranks
from kapelle.runtime.tensors import packed, unpacked
from kapelle.team import split_scored

if TYPE_CHECKING:
    from kapelle.engines.train.protocol import TrainEngine, TrainEngineSettings
    from kapelle.models.language_model import LanguageModel
    from kapelle.setup.preparation import PreparedRun


NAME = "A scoring worker"


class RayScorers(Learners):
    """The learners of a rank. Scoring workers hold the models that only score, and the rank's own engine holds all other models."""

    def __init__(
        self,
        connection: ActorConnection | None,
        bundles: Sequence[int],
        prepared: PreparedRun,
        models: Mapping[str, LanguageModel],
        engine: TrainEngine,
        ranks: Ranks,
    ) -> None:
        """Start the workers of this rank, one on each bundle. After the start, the workers load their models.

        The argument `prepared` contains the paths of the base models, and `models` contains the models that the rank holds, by base
        model name. Raises ConfigError if a model exists only in the memory of this process. A rank without workers needs no
        `connection`.
        """
        config, (_, scored) = prepared.config, split_scored(prepared.team)
        in_memory = [path for path in scored.bases.values() if path in prepared.given]
        if in_memory:
            raise ConfigError(
                f"Scoring workers read models from disk, but the model '{in_memory[0]}' is in the trainer's memory. Save it and "
                "set its folder in the recipe, or set `ray.scoring_workers: 0`."
            )
        self._engine, self._ranks, self._ray, self._models = engine, ranks, config.ray, models
        self._model_settings, self._connection = config.model, connection
        self._bases = dict(scored.bases)
        self._base_of = {name: critic.base for name, critic in scored.critics.items()}
        self._base_of |= {name: policy.base for name, policy in scored.beside.items()}
        self._readers: dict[str, Reader] = {}
        self._hashes: dict[str, str] = {}
        self._waiting = Waiting("scoring worker", "ray.scoring", config.ray.timeout)
        self._start_with = json.dumps(start_settings(config, self._bases)).encode()
        # Workers are assigned to the ranks in turn: these are the numbers of this rank's workers.
        self._bundles = {ranks.rank + k * ranks.size: each for k, each in enumerate(bundles)}
        self._workers = {k: self._start(each) for k, each in self._bundles.items()}

    def hashes(self, known: Mapping[str, str]) -> dict[str, str]:
        """Wait until all workers have loaded their models, and return the hashes of the weights of all base models by name.

        The argument `known` contains the hashes of the base models that this rank has loaded. Raises ConfigError if two processes
        have loaded different weights.
        """
        self._hashes = {base: found for base, found in known.items() if base in self._bases}

        def share() -> bytes:
            self._answers("score", dict.fromkeys(self._workers, b""))
            return json.dumps(self._hashes).encode()

        for part in self._ranks.all_gather("scoring workers", share):
            self._compare(json.loads(part))
        return {**known, **self._hashes}

    def renderer(self, learner: str) -> Reader:
        """See `Learners`."""
        base = self._base_of.get(learner)
        if base is None:
            return self._engine.renderer(learner)
        if base not in self._readers:
            from kapelle.models.renderer import load_renderer

            self._readers[base] = (
                self._models[base].renderer
                if base in self._models
                else load_renderer(self._bases[base], self._model_settings)
            )
        return self._readers[base]

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """See `Learners`. All ranks must call this method together."""
        return self._split("score", samples, self._engine.score)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """See `Learners`. All ranks must call this method together."""
        return self._split("embed", samples, self._engine.embed)

    def exchange(self, one: str, other: str) -> None:
        """See `Learners`."""
        self._engine.exchange(one, other)

    def refresh_references(self) -> None:
        """See `Learners`."""
        self._engine.refresh_references()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.actor.end()

    def _split(
        self, method: str, samples: Sequence[Sample], here: Callable[[Sequence[Sample]], list[Tensor]]
    ) -> list[Tensor]:
        """Send samples of models that only score to the workers, and pass all other samples to the engine."""
        apart = [k for k, sample in enumerate(samples) if sample.learner in self._base_of]
        own = [k for k, sample in enumerate(samples) if sample.learner not in self._base_of]
        found: dict[int, Tensor] = {}
        if apart:
            found |= zip(apart, self._remote(method, [samples[k] for k in apart]), strict=True)
        if own:
            found |= zip(own, here([samples[k] for k in own]), strict=True)
        return [found[k] for k in range(len(samples))]

    def _remote(self, method: str, samples: Sequence[Sample]) -> list[Tensor]:
        from kapelle.engines.train.batch import shard_samples

        count = self._ray.scoring_workers
        dealt = shard_samples(samples, count) if count > 1 else [list(range(len(samples)))]

        def share() -> bytes:
            requests = {
                k: dump_samples([samples[place] for place in dealt[k]]) for k in self._workers if dealt[k]
            }
            rows: dict[str, Tensor] = {}
            for k, answer in self._answers(method, requests).items():
                rows |= {str(place): answer[str(n)] for n, place in enumerate(dealt[k])}
            return packed(None, rows)

        found: dict[str, Tensor] = {}
        for part in self._ranks.all_gather("scoring", share):
            found |= unpacked(part)[1]
        return [found[str(k)] for k in range(len(samples))]

    def _answers(self, method: str, requests: Mapping[int, bytes]) -> dict[int, dict[str, Tensor]]:
        """Send a request to each worker, keyed by its index, and wait for the results.

        If a worker dies, a new worker is started.
        """
        found: dict[int, dict[str, Tensor]] = {}
        calls = {k: self._workers[k].actor.call(method, request) for k, request in requests.items()}
        while calls:
            first = self._waiting.first([self._workers[k] for k in calls], list(calls.values()))
            for k in [k for k, call in calls.items() if call is first]:
                worker, call = self._workers[k], calls.pop(k)
                try:
                    if worker.beginning is not None:
                        self._compare(unpacked(read_answer(worker.beginning, NAME))[0])
                        worker.beginning = None
                    found[k] = unpacked(read_answer(call, NAME))[1]
                    self._waiting.answered()
                except ActorLost as lost:
                    self._waiting.died(lost)
                    self._workers[k] = self._start(self._bundles[k])
                    calls[k] = self._workers[k].actor.call(method, requests[k])
        return found

    def _start(self, bundle: int) -> StartedWorker:
        assert self._connection is not None, "a rank with workers has joined the cluster"
        actor = self._connection.actor(RayScorer, bundle, self._ray.scoring)
        return StartedWorker.of(actor, self._start_with)

    def _compare(self, hashes: Mapping[str, str]) -> None:
        check_hashes("scoring worker", "another process of this run", self._hashes, hashes, self._bases)


# -------- Samples as bytes


def dump_samples(samples: Sequence[Sample]) -> bytes:
    """Return the fields of samples on which their scores depend, as bytes that `load_samples` can read."""
    images = {image.hash: image for sample in samples for image in sample.images}
    rows = [
        {
            "learner": sample.learner,
            "tokens": len(sample.tokens),
            "targets": len(sample.targets),
            "temperature": sample.temperature,
            "bundle": sample.bundle,
            "images": [image.hash for image in sample.images],
            **beside_row(sample.routing, sample.constraint),
            "begin": sample.begin,
        }
        for sample in samples
    ]
    numbers = [number for sample in samples for number in (*sample.tokens, *sample.targets)]
    return packed(
        {"samples": rows, "images": image_rows(images)}, {"numbers": torch.tensor(numbers, dtype=torch.int32)}
    )


def load_samples(data: bytes) -> list[Sample]:
    """Return the samples from bytes that `dump_samples` returned, without the columns of the samples."""
    plain, tensors = unpacked(data)
    numbers, samples, place = tensors["numbers"].tolist(), [], 0
    images = images_from(plain["images"])
    for row in plain["samples"]:
        middle = place + row["tokens"]
        end = middle + row["targets"]
        samples.append(
            Sample(
                row["learner"],
                tuple(numbers[place:middle]),
                tuple(numbers[middle:end]),
                temperature=row["temperature"],
                bundle=row["bundle"],
                images=tuple(images[name] for name in row["images"]),
                begin=row["begin"],
                **beside_from(row),
            )
        )
        place = end
    return samples


# -------- The actor


class RayScorer:
    """The actor of a scoring worker, which holds the models that only score."""

    def __init__(self) -> None:
        self._engine: TrainEngine | None = None

    def here(self) -> None:
        """Do nothing. If the call returns, the actor is running."""

    def begin(self, start_with: bytes) -> bytes:
        """Load the models with `start_settings` in JSON, and return the hashes of the base models."""
        return answer_or_error(lambda: packed(self._begin(json.loads(start_with)), {}))

    def _begin(self, settings: Mapping[str, Any]) -> dict[str, str]:
        from kapelle.engines.train.protocol import TrainSetup, UpdateLimits
        from kapelle.models.weights import hash_of_base
        from kapelle.runs.checkpoint_contents import load_policies, load_verifier
        from kapelle.setup.model_loading import load_models
        from kapelle.setup.team_builder import build_algorithm, build_team

        config = settled_config(self, settings)
        algorithm = build_algorithm(config)
        _, team = split_scored(build_team(config, algorithm))
        team = replace(team, bases=settings["bases"])
        models = load_models(team, config.model, {})
        hashes = {base: hash_of_base(model) for base, model in models.items()}
        tokens = config.training.microbatch_tokens
        limits = UpdateLimits(None if tokens == "auto" else tokens)
        beside, critics = list(team.beside.values()), list(team.critics.values())
        setup = TrainSetup(models, beside, critics, config.optimizer, limits, config.seed)
        engine = cast("TrainEngineSettings", config.train_engine).build(setup)
        verifier = algorithm.need(VerifierScores)
        for name, folder in verifier.folders.items() if verifier else ():
            if name in team.critics:
                load_verifier(Path(folder), team.critics[name], models, engine, hashes)
        past = {policy.name: Path(policy.past) for policy in beside if policy.past}
        load_policies(past, team, engine.weights, engine.load_weights, hashes)
        self._engine = engine
        return hashes

    def score(self, samples: bytes) -> bytes:
        """Return the result of `TrainEngine.score` as bytes: a mapping from the index of each sample to a tensor.

        Empty input means that there are no samples.
        """
        return answer_or_error(self._rows, samples, "score")

    def embed(self, samples: bytes) -> bytes:
        """Return the result of `TrainEngine.embed` as bytes: a mapping from the index of each sample to a tensor."""
        return answer_or_error(self._rows, samples, "embed")

    def _rows(self, samples: bytes, method: str) -> bytes:
        assert self._engine is not None, "a worker begins first"
        work = self._engine.score if method == "score" else self._engine.embed
        rows = work(load_samples(samples)) if samples else []
        return packed(None, {str(k): row for k, row in enumerate(rows)})
