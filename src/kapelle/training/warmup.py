"""Supervised warm-up of a base model on scripted demonstrations of the roles, cached by content.

An untrained tiny model cannot do anything. Before reinforcement learning it learns from demonstrations of each role
by the environment's script, with its stated flaws, so that it can partly do the task and there is
something left to learn. That is a separate stage. Its result depends on the settings, and in its last bits
on the machine and its threads; it is cached under a hash of the settings, with hashes of its files, which
are checked at every use.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kapelle.environment import PlayedFromOutside, offers, task_of
from kapelle.errors import CheckpointError, ModelError, TrainingHalted
from kapelle.models.adapters import shapes_of
from kapelle.models.checksums import verify_folder, write_checksums
from kapelle.models.language_model import DTYPES, LanguageModel, copy_language_model, hold_in
from kapelle.models.weights import copy_weights, save_model
from kapelle.rollout.episodes import rollout
from kapelle.rollout.play import Play, make_play
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.schema import RunConfig
from kapelle.setup.model_loading import build_train_engine, load_models, teacher
from kapelle.setup.problems import drawn, untested
from kapelle.team import Team
from kapelle.training.loop import Loop
from kapelle.training.provenance import machine, versions
from kapelle.training.selection import REDRAWN
from kapelle.training.warmup_settings import cache_folder, stage_of, stage_team, warmup_is_cached, warmup_key
from kapelle.types import Group, Task

# -------- On what a cached warmed-up model was made: `made.json` beside its weights, and what has changed since
#
# With another number of threads, on another processor or with another torch, sums are added up in another order, and after
# hundreds of steps the model differs. The cache returns the model that it holds, because runs that began with it need the
# same one again. A run that begins with it reports that its numbers differ from those of a model that is made here.

FILE = "made.json"


def origin_notes(folders: Iterable[str]) -> list[str]:
    """Return a line for each folder whose warmed-up model was made otherwise than it would be here."""
    here, notes = _here(), []
    for folder in dict.fromkeys(folders):
        try:
            made = json.loads((Path(folder) / FILE).read_text("utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        if not isinstance(made, Mapping):
            continue
        differs = [
            f"{key} {made[key]}, here {here[key]}" for key in here if key in made and made[key] != here[key]
        ]
        if differs:
            notes.append(
                f"the warmed-up model in {folder} was made otherwise ({'; '.join(differs)}): the numbers before training, and so "
                "those after it, are not those of one that is made here. Name another folder as `KAPELLE_CACHE` to make one."
            )
    return notes


def _here() -> dict[str, Any]:
    """Return what a model's last bits depend on besides its settings."""
    found = machine()
    features = found.pop("processor features", "")
    kernels = str(features).partition(":")[0]
    return {**found, "kernels": kernels, **{key: versions()[key] for key in ("torch", "transformers")}}


# -------- The stage before all others: `sft` on scripted demonstrations, one set of weights for all agents
#
# It is a run like any other, trained by the same loop. Only the source of a step's groups differs: the
# script plays a fixed number of episodes once, and every step learns from turns drawn from them.

ReportStep = Callable[[int, int, Mapping[str, float]], None]
"""Called with step, steps and metrics."""


def train_stage(
    config: RunConfig, progress: ReportStep | None, say: Callable[[str], None] = lambda _: None
) -> LanguageModel:
    """Return the base model of a run, warmed up; raises the errors of a step of training.

    The result depends on the settings, and in its last bits on threads, processor and versions.
    """
    assert config.warmup is not None
    stage = stage_of(config)
    algorithm, team = stage_team(stage)
    models = load_models(team, stage.model, {})
    play = make_play(stage, team, teacher(stage, team, models))
    with ExitStack() as playing:
        playing.callback(play.close)
        if offers(play.environment, PlayedFromOutside):
            playing.enter_context(play.environment.serve(play, lambda _name, line: say(line)))
        shown = demonstrations(play, stage, config.warmup.demonstrations)
    [policy] = [team.policies[name] for name in team.trained]
    model = models[policy.base]
    with closing(build_train_engine(stage, algorithm, team, models)) as engine:
        loop = Loop(stage, algorithm, play, engine, DrawnTurns(shown, config.warmup.batch, stage.seed))
        for number in range(1, stage.training.steps + 1):
            metrics = loop.step(number).metrics
            if progress is not None:
                # Speed means nothing here: nothing is sampled.
                learned = {name: value for name, value in metrics.items() if not name.startswith("time/")}
                progress(number, stage.training.steps, learned)
        copy_weights(model.base_parameters(), engine.weights(policy.name), f"policy '{policy.name}'")
    return model


def demonstrations(play: Play, config: RunConfig, count: int) -> list[Group]:
    """Return `count` episodes on training tasks as the script plays them, one in each group.

    A program sees the number of its task, so that of an endless split it gets those that training draws.
    Failed ones are left out; TrainingHalted if none is left.
    """
    environment = play.environment
    size = environment.size("train")
    fits = untested(config)
    # A curriculum's levels are shown in its own order, and after them the tasks that they lead to.
    tasks: list[Task] = []
    left_out = 0
    while len(tasks) < count:
        index = len(tasks) + left_out
        if size is not None:
            index %= size
        elif offers(environment, PlayedFromOutside):
            index = drawn(config.seed, index)
        task = task_of(environment, "train", index, played=len(tasks))
        if fits is None or fits(task):
            tasks.append(task)
        elif (left_out := left_out + 1) > REDRAWN * count:
            raise TrainingHalted(
                f"`evaluation.sets` holds {left_out} tasks of `{environment.name}` that the warm-up would show. Test on other problems."
            )
    groups = run_async(lambda: rollout(play, tasks, 1, derive_seed(config.seed, "demonstrations")))
    valid = [group for group in groups if group.valid]
    if not valid:
        raise TrainingHalted(
            f"None of {len(groups)} demonstrations for the warm-up could be played. The first one ended with: "
            f"{groups[0].episodes[0].error}"
        )
    return valid


class DrawnTurns:
    """The source of a warm-up's steps: turns of demonstrations, drawn at random for each step."""

    def __init__(self, shown: Sequence[Group], batch: int, seed: int) -> None:
        """Take the demonstrations, how many of their turns make a step, and the run's seed."""
        self._turns = [
            Group(group.task, (replace(episode, turns=(replace(turn, trained=True),)),))
            for group in shown
            for episode in group.valid
            for turn in episode.turns
        ]
        self._batch = min(batch, len(self._turns))
        self._draw = random.Random(derive_seed(seed, "warmup"))

    def __call__(self, number: int) -> list[Group]:
        """Return the turns of the next step, each as an episode of its own; call it for steps in order."""
        return self._draw.sample(self._turns, self._batch)


def warmed_up(
    config: RunConfig,
    progress: ReportStep | None = None,
    say: Callable[[str], None] = lambda _: None,
    hold: dict[str, LanguageModel] | None = None,
) -> Path:
    """Return the folder of the warmed-up model, training it unless it is cached.

    A cached model that has changed is deleted and trained anew, which is reported to `say`. If the disk has no room
    for it, the model itself is put into `hold`, by that folder's path, and reported too; without `hold` this is a
    CheckpointError.
    """
    assert config.warmup is not None
    folder = cache_folder() / "warmup" / warmup_key(config)
    if (folder / "config.json").is_file() and _is_sound(folder, say):
        return folder
    beside = _beside(folder)
    try:
        with _saving_in(folder.parent):  # before the work, so that it is not lost
            beside.mkdir(parents=True)
        model = train_stage(config, progress, say)
        try:
            with _saving_in(folder.parent):
                save_model(beside, model)
                (beside / FILE).write_text(json.dumps(_here(), indent=1) + "\n", "utf-8")
                try:
                    beside.rename(folder)
                except OSError:  # another process was faster; its model is the same
                    if not (folder / "config.json").is_file():
                        raise
        except CheckpointError as error:
            if hold is None:
                raise
            say(f"{error} This run continues all the same, and the next one warms up anew.")
            hold[str(folder)] = copy_language_model(model, str(folder))
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return folder


def warmed_bases(
    config: RunConfig,
    team: Team,
    progress: ReportStep,
    say: Callable[[str, str], None],
    hold: dict[str, LanguageModel] | None = None,
) -> Mapping[str, str]:
    """Return the path of every base of a team, with the warmed-up model in place of the original.

    `say` gets the phase and its detail; `hold` takes a model that the cache has no room for. Without a warm-up the bases
    are the team's own.
    """
    if config.warmup is None:
        return team.bases
    cached = warmup_is_cached(config)
    say("warm-up", "cached" if cached else "teaching the tiny model its roles from scripts")
    folder = str(warmed_up(config, progress, lambda line: say("warm-up", line), hold))
    still = all(
        base not in team.trained_bases for base, path in team.bases.items() if path == config.model.path
    )
    if still and folder in (hold or {}):  # as if it were loaded
        hold_in((hold or {})[folder].model, DTYPES[config.model.dtype])
    return {base: folder if path == config.model.path else path for base, path in team.bases.items()}


def _is_sound(folder: Path, say: Callable[[str], None]) -> bool:
    """Return whether a cached model is as it was written; one that is not is removed."""
    try:
        if not verify_folder(folder):
            shapes_of(folder)  # raises for truncated files
            say("the cached one has no list of hashes; it is used, and checked from now on")
            with suppress(OSError):  # a read-only cache still works
                write_checksums(folder)
    except ModelError as error:
        say(f"the cached one is deleted and made anew: {error}")
        aside = _beside(folder)
        with _saving_in(folder.parent), suppress(FileNotFoundError):  # another process has just done the same
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
            f"The warmed-up model cannot be saved in {folder}: {reason}. Free some space there, or set KAPELLE_CACHE "
            "to a folder that can be written."
        ) from error
