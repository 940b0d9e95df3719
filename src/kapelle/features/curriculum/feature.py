"""Measure the team's solve rate for each task before the first step, for `tasks.difficulty`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kapelle.environment import task_of
from kapelle.features.curriculum.draws import DrawsByDifficulty
from kapelle.features.curriculum.settings import DifficultyConfig
from kapelle.rollout.episodes import shared_rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.runtime.process_tree import doing
from kapelle.runtime.randomness import capture_random, derive_seed, restore_random
from kapelle.training.feature import Feature, StartedRun, StepInProgress

PLAYED = 256
"""Number of tasks whose solve rates are measured concurrently."""


class MeasuredDifficulty(Feature):
    """Passes the measured solve rates to the object that draws tasks. The solve rates are part of the checkpoint."""

    def __init__(self, settings: DifficultyConfig, run: StartedRun) -> None:
        self._samples, self._seed = settings.samples, run.config.seed
        self._rates: Mapping[int, float] | None = None

    def before_rollouts(self, step: StepInProgress) -> None:
        """Measure the solve rates before the first step, exclude tasks by their solve rates, and add metrics of the remaining tasks."""
        draws = step.tasks.draws
        assert isinstance(draws, DrawsByDifficulty), "the section selects it"
        if self._rates is None:
            self._rates = self._measured(step.setup, draws.measured)
        if draws.rates is not self._rates:
            draws.use(self._rates)
        solved = [self._rates[k] for k in draws.left if k in self._rates]
        step.metrics["tasks_left"] = float(len(draws.left))
        step.metrics["tasks_solve_rate"] = sum(solved) / len(solved) if solved else 0.0

    def _measured(self, setup: RolloutSetup, indices: Sequence[int]) -> dict[int, float]:
        doing("measuring the difficulty of the tasks")
        drawn = capture_random()  # a resumed run skips the measurement and must draw the same afterwards
        rates: dict[int, float] = {}
        for begin in range(0, len(indices), PLAYED):
            part = indices[begin : begin + PLAYED]
            tasks = [task_of(setup.environment, "train", index) for index in part]
            seed = derive_seed(self._seed, "difficulty", begin)
            for index, group in zip(part, shared_rollout(setup, tasks, self._samples, seed), strict=True):
                scored = [each.success >= 1.0 for each in group.valid if each.success is not None]
                if scored:
                    rates[index] = sum(scored) / len(scored)
        restore_random(drawn)
        return rates

    def state(self) -> dict[str, Any]:
        """Return the measured solve rates."""
        return {"rates": None if self._rates is None else list(self._rates.items())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state` returned."""
        rates = state["rates"]
        self._rates = None if rates is None else dict(rates)
