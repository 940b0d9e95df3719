"""Losses built into the library on purpose: what a harness does not see when it is there, it cannot vouch for.

Each plant changes the library in one process and names the trials that must then end with a defect.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults import calls, corruptions, crashes, forks, kills
from tests.faults.forks import fork
from tests.faults.judging import DEFECTS, Outcome, Verdict, last_line
from tests.faults.world import Trial, World

Trials = Callable[[World, int], Iterator[Trial]]

_MOST = 120
"""Trials after which a plant that no one has seen counts as not seen."""
_PATIENCE = 900.0


@dataclass(frozen=True, slots=True)
class Plant:
    """One loss."""

    name: str
    make: Callable[[], None]
    """Builds it into this process."""
    trials: Trials
    must: Outcome = Outcome.LOST
    """How it shows."""


def _put(owner: Any, name: str, value: object) -> None:
    setattr(owner, name, value)


def _latest_is_trusted() -> None:
    from kapelle.runs import writer
    from kapelle.runs.reader import read_latest
    from kapelle.training import stages

    def read(run: Path) -> Path | None:
        named = run / "latest"
        return run / named.read_text("utf-8").strip() if named.is_file() else read_latest(run)

    _put(stages, "read_latest", read)
    # No one sets it right either.
    point = writer.RunDirectory.point_latest
    _put(writer.RunDirectory, "point_latest", lambda run, folder: None if run.resumed else point(run, folder))


def _nothing_is_flushed() -> None:
    _put(os, "fsync", lambda _descriptor: None)


def _folders_are_not_flushed() -> None:
    real = os.fsync

    def files_alone(descriptor: Any) -> None:
        import stat

        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            real(descriptor)

    _put(os, "fsync", files_alone)


def _metrics_are_emptied() -> None:
    from kapelle.runs import writer

    cut = writer.cut_table
    _put(writer, "cut_table", lambda path, size: cut(path, 0 if path.name == "metrics.jsonl" else size))


def _rows_are_not_cut() -> None:
    from kapelle.runs import writer

    _put(writer, "cut_table", lambda path, size: None)


def _checkpoints_are_not_verified() -> None:
    from kapelle.runs import checkpoint, checkpoint_folder
    from kapelle.runtime.files import step_of

    for module in (checkpoint, checkpoint_folder):
        _put(module, "verify", lambda folder: step_of(folder) or 0)


def _generators_are_not_restored() -> None:
    from kapelle.runs import checkpoint_contents

    _put(checkpoint_contents, "restore_random", lambda state: None)


def _moments_are_not_restored() -> None:
    from kapelle.engines.train.torch.learner import Learner

    load = Learner.load_state

    def without(learner: Learner, state: Mapping[str, Any]) -> None:
        load(learner, {**state, "optimizer": {}})

    _put(Learner, "load_state", without)


def _played_ahead_is_forgotten() -> None:
    from kapelle.training.loop import Loop

    load = Loop.load_state

    def without(loop: Loop, state: Mapping[str, object]) -> None:
        load(loop, {**state, "ahead": loop.rollouts.state()})

    _put(Loop, "load_state", without)


def _what_credit_remembers_is_forgotten() -> None:
    from kapelle.training.loop import Loop

    def without(loop: Loop, state: Any) -> None:
        loop.rollouts.load_state(state["ahead"])

    _put(Loop, "load_state", without)


def _saved_in_place() -> None:
    from kapelle.runs import checkpoint

    # Without another name there is nothing to rename, and a manifest comes before its files.
    _put(checkpoint, "_seal", lambda folder, step, listings: None)


def _disk_is_not_explained() -> None:
    from contextlib import nullcontext

    from kapelle import cli
    from kapelle.runs import writer

    _put(writer, "writing", lambda path: nullcontext())
    _put(cli, "refusal", lambda error: None)  # the net below it, at the command line


def _tried_again_for_ever() -> None:
    from kapelle.runs import writer
    from kapelle.runtime import files

    forks.DEADLINE = 10.0

    def write_all(descriptor: int, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(descriptor, left) :]
            except OSError:
                continue

    for module in (files, writer):
        _put(module, "write_all", write_all)


def _killed(kind: str) -> Trials:
    return lambda world, seed: kills.trials(world, seed, only=(kind,))


PLANTS = (
    Plant("`latest` is trusted by the next stage", _latest_is_trusted, calls.killed_between_stages),
    Plant("nothing is flushed", _nothing_is_flushed, crashes.trials),
    Plant("folders are not flushed", _folders_are_not_flushed, crashes.trials),
    Plant("a resume empties the metrics", _metrics_are_emptied, _killed("demo")),
    Plant("a resume leaves rows that it will write again", _rows_are_not_cut, _killed("demo")),
    Plant("checkpoints are not verified", _checkpoints_are_not_verified, corruptions.trials),
    Plant("checkpoints have no manifest", _saved_in_place, _killed("demo")),
    Plant("generators are not restored", _generators_are_not_restored, _killed("an environment that draws")),
    Plant("moments of the optimiser are not restored", _moments_are_not_restored, _killed("mrlm_ppo")),
    Plant("steps played ahead are forgotten", _played_ahead_is_forgotten, _killed("steps played ahead")),
    Plant("a mixer and its replay are forgotten", _what_credit_remembers_is_forgotten, _killed("maverl_debate_qmix")),
    Plant("a fault of the disk is not explained", _disk_is_not_explained, calls.failing, Outcome.TRACEBACK),
    Plant("a write that fails is tried for ever", _tried_again_for_ever, calls.failing, Outcome.HUNG),
)  # fmt: skip
RUNS = (
    "demo",
    "an environment that draws",
    "mrlm_ppo",
    "steps played ahead",
    "maverl_debate_qmix",
    "mrlm_hybrid",
)


def trials(world: World, seed: int) -> Iterator[Trial]:
    """Yield one trial for each plant: it comes to a clear error when the plant was seen, else to a loss."""
    for number, plant in enumerate(PLANTS):
        yield Trial(plant.name, partial(_planted, world, plant, seed, number))


def _planted(world: World, plant: Plant, seed: int, number: int) -> Verdict:
    log, note = world.folder / f"plant-{number}.log", world.folder / f"plant-{number}.seen"
    # A folder of its own: the half ways of a library with a plant are made by that library.
    apart = World(world.folder / f"plant-{number}", world.kinds, world.undisturbed)
    ended = fork(partial(_look, apart, plant, seed, note), log, deadline=_PATIENCE)
    if not note.exists():
        return Verdict(Outcome.LOST, f"not seen: {last_line(ended.said)}")
    return Verdict(Outcome.CLEAR, note.read_text("utf-8"))


def _look(world: World, plant: Plant, seed: int, note: Path) -> int:
    world.scratch.mkdir(parents=True)
    plant.make()
    drawn = list(plant.trials(world, seed))
    random.Random(seed).shuffle(drawn)
    for count, trial in enumerate(drawn[:_MOST], start=1):
        came_to = trial.run()
        several = came_to if isinstance(came_to, list) else [(trial.name, came_to)]
        seen = [f"{name}: {v.outcome}: {v.detail}" for name, v in several if v.outcome is plant.must]
        if seen:
            note.write_text(f"seen by trial {count}, {seen[0]}", "utf-8")
            return 0
    return 1


assert {plant.must for plant in PLANTS} == set(DEFECTS), "every kind of defect is planted"
