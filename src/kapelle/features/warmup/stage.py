"""Warm up a base model by supervised training on demonstrations, and cache the result under a hash of the settings.

An untrained tiny model solves no tasks, so reinforcement learning would receive no rewards. The demonstrations are written by the
environment's scripted expert, which makes deliberate mistakes so that something remains to be learned. The hashes of the files of a
cached model are verified whenever the model is used.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kapelle.environment import DrivenByPrograms, offers, task_of
from kapelle.errors import CheckpointError, ModelError, TrainingHalted
from kapelle.features.warmup.key import stage_of, stage_team, warmup_is_cached, warmup_key
from kapelle.models.adapters import shapes_of
from kapelle.models.checksums import verify_folder, write_checksums
from kapelle.models.language_model import DTYPES, LanguageModel, copy_language_model, hold_in
from kapelle.models.lora_bank import copy_weights
from kapelle.models.weights import save_model
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup, make_rollout_setup
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.files import cache_folder
from kapelle.runtime.machine import long_lived_apart
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.schema import RunConfig
from kapelle.setup.feature import Report, ReportStep
from kapelle.setup.model_loading import build_train_engine, load_models, teacher
from kapelle.setup.problems import drawn, untested
from kapelle.team import Team
from kapelle.training.feature import StepInProgress
from kapelle.training.loop import Loop
from kapelle.training.provenance import machine, versions
from kapelle.training.rollouts import Rollouts
from kapelle.training.selection import REDRAWN, TrainingTasks, tasks_of
from kapelle.types import Group, Task

MADE = "made.json"
"""Name of a file in the folder of a cached model, which contains the machine and the versions with which the model was trained."""


def origin_note(folder: str) -> str:
    """Return how the threads, processor or versions of a cached model differ from those of this machine, or an empty string.

    Such differences change the order of summation, and after hundreds of steps also the weights. A run that continues needs the
    cached model, so the cached model is used and the difference is reported.
    """
    here = _here()
    try:
        made = json.loads((Path(folder) / MADE).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return ""
    if not isinstance(made, Mapping):
        return ""
    differs = [
        f"{key} {made[key]}, here {here[key]}" for key in here if made.get(key, here[key]) != here[key]
    ]
    if not differs:
        return ""
    return (
        f"the warmed-up model in {folder} was trained under other conditions ({'; '.join(differs)}), so results differ from those of a model "
        "trained here. Set `KAPELLE_CACHE` to another folder to train one here."
    )


def _here() -> dict[str, Any]:
    """Return the properties of this machine, other than settings, on which the last bits of a model depend."""
    found = machine()
    kernels = str(found.pop("processor features", "")).partition(":")[0]
    return {**found, "kernels": kernels, **{key: versions()[key] for key in ("torch", "transformers")}}


# -------- The stage: `sft` on demonstrations, with one set of weights for all agents
#
# The training loop trains it. The script acts once in a fixed number of episodes, and each step samples turns of these.


def train_stage(
    config: RunConfig, progress: ReportStep | None, say: Callable[[str], None] = lambda _: None
) -> LanguageModel:
    """Train and return the warmed-up base model of a run. Raises the same errors as a training step."""
    assert config.warmup is not None
    stage = stage_of(config)
    algorithm, team = stage_team(stage)
    models = load_models(team, stage.model, {})
    setup = make_rollout_setup(stage, team, teacher(stage, team, models))
    with ExitStack() as playing, long_lived_apart():
        playing.callback(setup.close)
        if offers(setup.environment, DrivenByPrograms):
            playing.enter_context(setup.environment.serve(setup, lambda _name, line: say(line)))
        shown = demonstrations(setup, stage, config.warmup.demonstrations)
    [policy] = [team.policies[name] for name in team.trained]
    model = models[policy.base]
    with closing(build_train_engine(stage, algorithm, team, models)) as engine, long_lived_apart():
        turns = DrawnTurns(shown, config.warmup.batch, stage.seed, tasks_of(setup, stage))
        loop = Loop(stage, algorithm, setup, engine, turns)
        for number in range(1, stage.training.steps + 1):
            metrics = loop.step(number).metrics
            if progress is not None:
                # Nothing is sampled, so sampling speed has no meaning.
                row = {name: value for name, value in metrics.items() if not name.startswith("time/")}
                progress(number, stage.training.steps, row)
        copy_weights(model.base_parameters(), engine.weights(policy.name), f"policy '{policy.name}'")
    return model


def demonstrations(setup: RolloutSetup, config: RunConfig, count: int) -> list[Group]:
    """Return the valid episodes of the scripted expert on `count` train tasks, with one episode in each group.

    Raises TrainingHalted if all episodes failed. An external program can read the index of its task. On an unlimited split, the
    program therefore receives the same indices that training draws.
    """
    environment = setup.environment
    size = environment.size("train")
    fits = untested(config)
    tasks: list[Task] = []
    excluded = 0
    while len(tasks) < count:
        index = len(tasks) + excluded
        if size is not None:
            index %= size
        elif offers(environment, DrivenByPrograms):
            index = drawn(config.seed, index)
        task = task_of(environment, "train", index, played=len(tasks))
        if fits is None or fits(task):
            tasks.append(task)
        elif (excluded := excluded + 1) > REDRAWN * count:
            raise TrainingHalted(
                f"`evaluation.sets` contains {excluded} tasks of `{environment.name}` that the warm-up would train on. Evaluate on other "
                "problems."
            )
    groups = run_async(lambda: rollout(setup, tasks, 1, derive_seed(config.seed, "demonstrations")))
    valid = [group for group in groups if group.valid]
    if not valid:
        raise TrainingHalted(
            f"All {len(groups)} demonstrations for the warm-up failed. The first error was: {groups[0].episodes[0].error}"
        )
    return valid


class DrawnTurns(Rollouts):
    """Samples `batch` turns of demonstrations for each step, each as a separate episode.

    The methods must be called for the steps in order.
    """

    def __init__(self, demonstrations: Sequence[Group], batch: int, seed: int, tasks: TrainingTasks) -> None:
        self.tasks = tasks
        self._turns = [
            Group(group.task, (replace(episode, turns=(replace(turn, trained=True),)),))
            for group in demonstrations
            for episode in group.valid
            for turn in episode.turns
        ]
        self._batch = min(batch, len(self._turns))
        self._draw = random.Random(derive_seed(seed, "warmup"))

    def collect(self, step: StepInProgress) -> list[Group]:
        """Return the turns of the next optimiser step."""
        return self._draw.sample(self._turns, self._batch)


def warmed_up(
    config: RunConfig,
    progress: ReportStep | None = None,
    say: Callable[[str], None] = lambda _: None,
    hold: dict[str, LanguageModel] | None = None,
) -> Path:
    """Return the folder of the warmed-up model. The model is trained unless it is cached and its files are intact.

    If there is not enough disk space, the model is stored in `hold` under the path of the folder. Raises CheckpointError if there is
    not enough disk space and `hold` is None. The function `say` receives a message about each problem.
    """
    assert config.warmup is not None
    folder = cache_folder() / "warmup" / warmup_key(config)
    if (folder / "config.json").is_file() and _is_sound(folder, say):
        return folder
    beside = _beside(folder)
    try:
        with _saving_in(folder.parent):  # checked before the work, which would otherwise be lost
            beside.mkdir(parents=True)
        model = train_stage(config, progress, say)
        try:
            with _saving_in(folder.parent):
                save_model(beside, model)
                (beside / MADE).write_text(json.dumps(_here(), indent=1) + "\n", "utf-8")
                try:
                    beside.rename(folder)
                except OSError:  # another process has saved the same model first
                    if not (folder / "config.json").is_file():
                        raise
        except CheckpointError as error:
            if hold is None:
                raise
            say(f"{error} This run continues; the next run repeats the warm-up.")
            hold[str(folder)] = copy_language_model(model, str(folder))
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def warmed_bases(
    config: RunConfig,
    team: Team,
    progress: ReportStep,
    report: Report,
    hold: dict[str, LanguageModel],
) -> Mapping[str, str]:
    """Return the path of every base model of a team, in which the warmed-up model replaces the original model.

    If there is no room for the model in the cache, the model is stored in `hold`.
    """
    cached = warmup_is_cached(config)
    report(
        "warm-up", "cached" if cached else "training the tiny model on scripted demonstrations of its roles"
    )
    folder = str(warmed_up(config, progress, lambda line: report("warm-up", line), hold))
    if note := origin_note(folder):
        report("cache", note)
    warmed = [base for base, path in team.bases.items() if path == config.model.path]
    if folder in hold and not set(warmed) & set(team.trained_bases):  # its dtype is that of a loaded model
        hold_in(hold[folder].model, DTYPES[config.model.dtype])
    return {**team.bases, **dict.fromkeys(warmed, folder)}


def _is_sound(folder: Path, report: Callable[[str], None]) -> bool:
    """Return whether the files of a cached model are intact. Damaged models are removed from the cache."""
    try:
        if not verify_folder(folder):
            shapes_of(folder)  # raises for truncated files
            report("the cached model has no list of hashes; the list is written now")
            with suppress(OSError):  # the cache may be read-only
                write_checksums(folder)
    except ModelError as error:
        report(f"the cached model is deleted and trained again: {error}")
        aside = _beside(folder)
        with _saving_in(folder.parent), suppress(FileNotFoundError):  # another process removed it
            folder.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        return False
    return True


def _beside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{os.getpid()}.{secrets.token_hex(4)}")


@contextmanager
def _saving_in(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise CheckpointError(
            f"The warmed-up model cannot be saved in {folder}: {reason}. Free some disk space, or set KAPELLE_CACHE "
            "to a writable folder."
        ) from error
