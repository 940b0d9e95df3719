"""The stage before all others: `sft` on scripted demonstrations, one set of weights for all agents.

It is a run like any other, trained by the same loop. Only the source of a step's groups differs: the
script plays a fixed number of episodes once, and every step learns from turns drawn from them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace

from kapelle.environments.bounded_worlds import task_of
from kapelle.errors import TrainingHalted
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import copy_weights
from kapelle.rollout.play import Play, make_play, rollout
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import RunConfig
from kapelle.setup.model_loading import build_train_engine, load_models, teacher
from kapelle.training.loop import Loop
from kapelle.training.warmup_settings import stage_of, stage_team
from kapelle.types import Group

ReportStep = Callable[[int, int, Mapping[str, float]], None]
"""Called with step, steps and metrics."""


def train_stage(config: RunConfig, progress: ReportStep | None) -> LanguageModel:
    """Return the base model of a run, warmed up; raises the errors of a step of training.

    The result depends on the settings, and in its last bits on threads, processor and versions.
    """
    assert config.warmup is not None
    stage = stage_of(config)
    algorithm, team = stage_team(stage)
    models = load_models(team, stage.model, {})
    play = make_play(stage, team, teacher(stage, team, models))
    with closing(play):
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

    Failed ones are left out; TrainingHalted if none is left.
    """
    environment = play.environment
    size = environment.size("train")
    indices = range(count) if size is None else [k % size for k in range(count)]
    tasks = [task_of(environment, "train", index) for index in indices]
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
