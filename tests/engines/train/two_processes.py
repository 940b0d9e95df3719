"""A sketch of data parallelism, to show that it takes one new folder: an engine of several processes joined by gloo.

Every process holds the same learners. Whatever changes them is done by all; of an update's step each takes a share of the
samples, whole units at a time, and sums of losses, weights and gradients are added up before they are divided. The process
that builds the engine is rank 0, scores alone, and is the only one that the run knows.

What a real one adds: scoring and embedding that are shared too, dropout drawn by sample, and weights that do not fit one
device.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.protocol import Objective, Published, TrainSetup
from kapelle.engines.train.sums import UpdateSums, book
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.engines.train.torch.learner import Learner
from kapelle.errors import EngineError
from kapelle.models.language_model import LanguageModel
from kapelle.rows import Sample
from kapelle.settings.base import Settings

SECONDS = 60
"""For which a process waits for the others."""


class BrokenOff(EngineError):
    """Another process has the reason."""


class TwoProcesses(Settings):
    """Settings of the sketch."""

    name: Literal["tests.engines.train.two_processes:TwoProcesses"] = (
        "tests.engines.train.two_processes:TwoProcesses"
    )
    processes: int = 2

    def build(self, setup: TrainSetup) -> DataParallel:
        return DataParallel(setup, self.processes)


@dataclass
class Rank:
    """One of several processes that share every step."""

    rank: int
    processes: int
    rows: list[int] = field(default_factory=list)
    """How many samples of each step were its own."""

    def share(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Deal out units: samples that a loss compares, and those that share their prompt as the answers of a group do."""
        units: dict[str, dict[object, list[Sample]]] = {}
        for sample in samples:
            unit = sample.tokens[: sample.targets[0]] if sample.bundle is None else sample.bundle
            units.setdefault(sample.learner, {}).setdefault(unit, []).append(sample)
        dealt = [unit for own in units.values() for unit in list(own.values())[self.rank :: self.processes]]
        own = [sample for unit in dealt for sample in unit]
        self.rows.append(len(own))
        return own

    def join(self, sums: UpdateSums, learners: Mapping[str, Learner]) -> None:
        grown = {
            (name, key)
            for name, learner in learners.items()
            for key, parameter in learner.parameters.items()
            if parameter.grad is not None
        }
        parts: list[tuple[UpdateSums, set[tuple[str, str]]] | None] = [None] * self.processes
        distributed.all_gather_object(parts, (sums, grown))
        present = [part for part in parts if part is not None]
        if len(present) < self.processes:
            raise BrokenOff("Another process of the train engine broke off.")
        joined = UpdateSums()
        for part, _ in present:
            _add(joined, part)
        sums.weight, sums.sums, sums.bad, sums.gaps = joined.weight, joined.sums, joined.bad, joined.gaps
        for name, key in sorted(set.union(*(grown for _, grown in present))):
            parameter = learners[name].parameters[key]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            distributed.all_reduce(parameter.grad)

    def give_up(self) -> None:
        distributed.all_gather_object([None] * self.processes, None)


def _add(joined: UpdateSums, part: UpdateSums) -> None:
    for name, weight in part.weight.items():
        joined.weight[name] = joined.weight.get(name, 0.0) + weight
    for name, metrics in part.sums.items():
        for metric, (total, weight) in metrics.items():
            book(joined.sums.setdefault(name, {}), metric, total, weight)
    joined.bad |= part.bad
    joined.gaps.extend(part.gaps)


def _join_group(rank: int, processes: int, store: str) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=SECONDS),
    )


def serve(rank: int, processes: int, store: str, pipe: Connection) -> None:
    """Do in a process of its own what rank 0 says, until it says no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    setup, bare = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from the process that started this one
    models = {base: LanguageModel(*parts) for base, parts in bare.items()}
    _join_group(rank, processes, store)
    sharing = Rank(rank, processes)
    engine = TorchTrainEngine(replace(setup, models=models), sharing)
    with suppress(EOFError):
        while True:
            name, arguments = pickle.loads(pipe.recv_bytes())  # noqa: S301 - likewise
            try:
                answer = sharing.rows if name == "rows" else getattr(engine, name)(*arguments)
            except Exception as error:  # noqa: BLE001 - rank 0 has failed likewise, or hears of it
                answer = EngineError(f"Rank {rank} of the train engine failed: {error!r}")
            pipe.send_bytes(pickle.dumps(answer))
    distributed.destroy_process_group()


class DataParallel:
    """Rank 0, and the others behind it."""

    def __init__(self, setup: TrainSetup, processes: int) -> None:
        bare = {
            base: (model.model, model.tokenizer, str(model.dtype).removeprefix("torch."), model.name)
            for base, model in setup.models.items()
        }
        said = pickle.dumps((replace(setup, models={}), bare))
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.preloaded"])
        self._others: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        for rank in range(1, processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, processes, store, theirs), daemon=True)
            process.start()
            theirs.close()
            ours.send_bytes(said)
            self._others.append((process, ours))
        _join_group(0, processes, store)
        self.sharing = Rank(0, processes)
        self._own = TorchTrainEngine(setup, self.sharing)

    def _together(self, name: str, *arguments: object) -> Any:
        """Let all processes do the same, and return what it came to here."""
        for _, pipe in self._others:
            pipe.send_bytes(pickle.dumps((name, arguments)))
        failure: BaseException | None = None
        answer = None
        try:
            answer = getattr(self._own, name)(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised below, once the others have answered
            failure = error
        answers = [pickle.loads(pipe.recv_bytes()) for _, pipe in self._others]  # noqa: S301 - of our own
        theirs = [each for each in answers if isinstance(each, EngineError)]
        if theirs and (failure is None or isinstance(failure, BrokenOff)):
            raise theirs[0] from failure
        if failure is not None:
            raise failure
        return answer

    def ask(self, rank: int, name: str) -> Any:
        """Return what one other process says."""
        pipe = self._others[rank - 1][1]
        pipe.send_bytes(pickle.dumps((name, ())))
        return pickle.loads(pipe.recv_bytes())  # noqa: S301 - of our own

    @property
    def versions(self) -> Mapping[str, int]:
        return self._own.versions

    def renderer(self, learner: str) -> WritingRenderer:
        return self._own.renderer(learner)

    def weights(self, name: str) -> Mapping[str, Tensor]:
        return self._own.weights(name)

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        self._together("load_weights", name, {key: tensor.detach() for key, tensor in weights.items()})

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        return self._own.score(samples)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        return self._own.embed(samples)

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        found: dict[str, float] = self._together("update", samples, objective)
        return found

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        return self._own.check_parity(samples, weights)

    def publish(self) -> Mapping[str, Published]:
        return self._own.publish()

    def exchange(self, one: str, other: str) -> None:
        self._together("exchange", one, other)

    def refresh_references(self) -> None:
        self._together("refresh_references")

    def state(self) -> dict[str, object]:
        return self._own.state()

    def load_state(self, state: Mapping[str, object]) -> None:
        self._together("load_state", state)

    def close(self) -> None:
        others, self._others = self._others, []
        for _, pipe in others:
            pipe.close()
        for process, _ in others:
            process.join(SECONDS)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        self._folder.cleanup()
