"""Scoring workers on a cluster: actors that hold what is only scored, and read the turns of a step for all ranks.

What is only scored plays nothing and learns nothing: the verifier that pays, teachers, embedding models (`team.split_scored`). A
worker builds a train engine of the recipe's kind with nothing else in it. Samples are dealt to workers as they are dealt to ranks, so
that one worker scores the batches of one rank, and as many as there are ranks those of as many ranks, to the bit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kapelle.algorithms.signals.verifier import VerifierScores
from kapelle.cluster.actors import (
    ActorCall,
    ActorConnection,
    ActorLost,
    StartedWorker,
    Waiting,
    check_hashes,
    settle_in,
)
from kapelle.cluster.sampling import beside_from, beside_row, image_rows, images_from
from kapelle.errors import ConfigError
from kapelle.rows import Learners, Reader, Sample
from kapelle.runtime.foreign_code import received_error, sent_error
from kapelle.runtime.on_demand import Tensor, torch
from kapelle.runtime.ranks import Ranks
from kapelle.runtime.tensors import packed, unpacked
from kapelle.team import split_scored

if TYPE_CHECKING:
    from kapelle.engines.train.protocol import TrainEngine, TrainEngineSettings
    from kapelle.models.language_model import LanguageModel
    from kapelle.setup.preparation import PreparedRun


class RayScorers(Learners):
    """What signals and hooks ask on a rank: scoring workers for what is only scored, the rank's own engine for everything else."""

    def __init__(
        self,
        connection: ActorConnection | None,
        bundles: Sequence[int],
        prepared: PreparedRun,
        models: Mapping[str, LanguageModel],
        engine: TrainEngine,
        ranks: Ranks,
    ) -> None:
        """Start the workers that this rank asks, one on each bundle; they load their models meanwhile.

        `prepared` names the bases' paths on the disk; `models` are those that the rank holds, by base name. Raises ConfigError for a
        model that is in this process's memory alone. A rank without workers needs no `connection`.
        """
        config, (_, scored) = prepared.config, split_scored(prepared.team)
        in_memory = [path for path in scored.bases.values() if path in prepared.given]
        if in_memory:
            raise ConfigError(
                f"Scoring workers read models from the disk, but the model '{in_memory[0]}' is in the trainer's memory. Save it and "
                "name its folder in the recipe, or set `ray.scoring_workers: 0`."
            )
        self._engine, self._ranks, self._ray, self._models = engine, ranks, config.ray, models
        self._model_settings, self._connection = config.model, connection
        self._bases = dict(scored.bases)
        self._base_of = {name: critic.base for name, critic in scored.critics.items()}
        self._base_of |= {name: policy.base for name, policy in scored.beside.items()}
        self._readers: dict[str, Reader] = {}
        self._hashes: dict[str, str] = {}
        self._waiting = Waiting("scoring worker", "scored", "ray.scoring", config.ray.timeout)
        self._begin_with = json.dumps(
            {
                "config": config.model_dump(mode="json"),
                "bases": self._bases,
                "path": sys.path,
                "folder": str(Path.cwd()),
            }
        ).encode()
        # Of all workers, this rank asks those whose number leaves its own when it is divided by the number of ranks.
        self._bundles = {ranks.rank + k * ranks.size: each for k, each in enumerate(bundles)}
        self._workers = {k: self._started(each) for k, each in self._bundles.items()}

    def hashes(self, known: Mapping[str, str]) -> dict[str, str]:
        """Wait until all workers have loaded their models; return `known`, with the hashes of their bases' weights, by base name.

        `known` are those that this rank has read itself. Raises ConfigError where processes have read other weights.
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
        """See `Learners`; all ranks have to ask together."""
        return self._split("score", samples, self._engine.score)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """See `Learners`; all ranks have to ask together."""
        return self._split("embed", samples, self._engine.embed)

    def exchange(self, one: str, other: str) -> None:
        """See `Learners`."""
        self._engine.exchange(one, other)

    def refresh_references(self) -> None:
        """See `Learners`."""
        self._engine.refresh_references()

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers.values():
            worker.actor.end()

    def _split(
        self, method: str, samples: Sequence[Sample], here: Callable[[Sequence[Sample]], list[Tensor]]
    ) -> list[Tensor]:
        """Let the workers answer for the samples of what they hold, and the engine for the others."""
        apart = [k for k, sample in enumerate(samples) if sample.learner in self._base_of]
        own = [k for k, sample in enumerate(samples) if sample.learner not in self._base_of]
        found: dict[int, Tensor] = {}
        if apart:
            found |= zip(apart, self._scored(method, [samples[k] for k in apart]), strict=True)
        if own:
            found |= zip(own, here([samples[k] for k in own]), strict=True)
        return [found[k] for k in range(len(samples))]

    def _scored(self, method: str, samples: Sequence[Sample]) -> list[Tensor]:
        from kapelle.engines.train.batch import shard_samples

        count = self._ray.scoring_workers
        dealt = shard_samples(samples, count) if count > 1 else [list(range(len(samples)))]

        def share() -> bytes:
            questions = {
                k: dump_samples([samples[place] for place in dealt[k]]) for k in self._workers if dealt[k]
            }
            rows: dict[str, Tensor] = {}
            for k, answer in self._answers(method, questions).items():
                rows |= {str(place): answer[str(n)] for n, place in enumerate(dealt[k])}
            return packed(None, rows)

        found: dict[str, Tensor] = {}
        for part in self._ranks.all_gather("scoring", share):
            found |= unpacked(part)[1]
        return [found[str(k)] for k in range(len(samples))]

    def _answers(self, method: str, questions: Mapping[int, bytes]) -> dict[int, dict[str, Tensor]]:
        """Ask workers, by number, and wait for their answers; one that dies is started again and asked again."""
        found: dict[int, dict[str, Tensor]] = {}
        asked = {k: self._workers[k].actor.ask(method, question) for k, question in questions.items()}
        while asked:
            first = self._waiting.first([self._workers[k] for k in asked], list(asked.values()))
            for k in [k for k, call in asked.items() if call is first]:
                worker, call = self._workers[k], asked.pop(k)
                try:
                    if worker.beginning is not None:
                        self._compare(_read(worker.beginning)[0])
                        worker.beginning = None
                    found[k] = _read(call)[1]
                    self._waiting.answered()
                except ActorLost as lost:
                    self._waiting.died(lost)
                    self._workers[k] = self._started(self._bundles[k])
                    asked[k] = self._workers[k].actor.ask(method, questions[k])
        return found

    def _started(self, bundle: int) -> StartedWorker:
        assert self._connection is not None, "a rank with workers has joined the cluster"
        actor = self._connection.actor(RayScorer, bundle, self._ray.scoring)
        return StartedWorker.of(actor, self._begin_with)

    def _compare(self, hashes: Mapping[str, str]) -> None:
        check_hashes("scoring worker", "another process of this run", self._hashes, hashes, self._bases)


def _read(asked: ActorCall) -> tuple[Any, dict[str, Tensor]]:
    """Return a worker's answer; raises what it raised."""
    plain, tensors = unpacked(bytes(asked.answer()))
    if "error" in plain:
        raise received_error(plain["error"], "A scoring worker")
    return plain["said"], tensors


# -------- Samples as bytes


def dump_samples(samples: Sequence[Sample]) -> bytes:
    """Return what of samples their scores depend on; `load_samples` takes it apart."""
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
    """Return the samples that `dump_samples` was given, without their columns."""
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
    """The actor: holds what is only scored. An error is an answer (`sent_error`), so that the trainer can raise the same one."""

    def __init__(self) -> None:
        self._engine: TrainEngine | None = None

    def here(self) -> None:
        """Answer, which shows that the actor runs."""

    def begin(self, start_with: bytes) -> bytes:
        """Load what is scored: settings, paths of its bases, and what to import from, as JSON. Returns the hashes of its bases."""
        said = json.loads(start_with)
        settle_in(self, said)
        return _answered(lambda: (self._begin(said), {}))

    def _begin(self, said: Mapping[str, Any]) -> dict[str, str]:
        from kapelle.engines.train.protocol import TrainSetup, UpdateLimits
        from kapelle.models.weights import hash_of_base
        from kapelle.runs.checkpoint_contents import load_policies, load_verifier
        from kapelle.runtime.randomness import keep_imports_from_drawing
        from kapelle.setup.model_loading import load_models
        from kapelle.setup.recipe import resolve
        from kapelle.setup.team_builder import build_algorithm, build_team

        torch.set_num_threads(torch.get_num_threads())
        keep_imports_from_drawing()
        config = resolve(said["config"])
        algorithm = build_algorithm(config)
        _, team = split_scored(build_team(config, algorithm))
        team = replace(team, bases=said["bases"])
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
        """Return `TrainEngine.score` of samples, a tensor by each one's number; no bytes are no samples."""
        return _answered(lambda: self._rows(samples, lambda engine: engine.score))

    def embed(self, samples: bytes) -> bytes:
        """Return `TrainEngine.embed` of samples, a tensor by each one's number."""
        return _answered(lambda: self._rows(samples, lambda engine: engine.embed))

    def _rows(
        self, samples: bytes, work: Callable[[TrainEngine], Callable[[Sequence[Sample]], list[Tensor]]]
    ) -> tuple[None, dict[str, Tensor]]:
        assert self._engine is not None, "a worker begins first"
        rows = work(self._engine)(load_samples(samples)) if samples else []
        return None, {str(k): row for k, row in enumerate(rows)}


def _answered(work: Callable[[], tuple[Any, Mapping[str, Tensor]]]) -> bytes:
    try:
        said, rows = work()
        return packed({"said": said}, rows)
    except Exception as error:  # noqa: BLE001 - the trainer, which waits for the answer, raises it again
        return packed({"error": sent_error(error)}, {})
