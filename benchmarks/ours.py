"""Kapelle's side of a training step: a trainer on a model in memory, without files, warm-up or evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.subjects import FixedTasks
from kapelle.algorithms.grpo import GRPO
from kapelle.models.language_model import LanguageModel
from kapelle.settings.schema import EvaluationConfig, OptimizerConfig, TrainingConfig
from kapelle.training.trainer import Trainer
from kapelle.workflows.parallel import Parallel

LEARNING_RATE = 1e-5


def grpo_trainer(
    model: LanguageModel,
    team: Mapping[str, Any],
    prompts: int,
    samples: int,
    new: int,
    prompt_tokens: int = 64,
) -> Trainer:
    """Return a GRPO trainer whose steps do `prompts` × `samples` × `new` tokens for each agent."""
    return Trainer(
        model=model,
        team={"sampling": {"max_tokens": new}, **team},
        environment=FixedTasks(prompt_tokens=prompt_tokens),
        workflow=Parallel(),
        algorithm=GRPO(group_size=samples),
        optimizer=OptimizerConfig(lr=LEARNING_RATE),
        training=TrainingConfig(steps=1000, tasks_per_step=prompts),
        evaluation=EvaluationConfig(before_and_after=False),
    )


def take_step(trainer: Trainer, completions: int, new: int, *, exact: bool = True) -> Mapping[str, float]:
    """Take one step, check that it did the work that was asked for, and return its metrics; without `exact` answers may end early."""
    (step,) = trainer.steps(1)
    turns = [turn for group in step.groups for episode in group.episodes for turn in episode.turns]
    assert len(turns) == completions, f"{len(turns)} completions"
    lengths = {len(turn.completion_ids) for turn in turns}
    assert lengths == {new} or (not exact and max(lengths) == new), "every completion has full length"
    assert set(trainer.engine.versions.values()) == {step.number}, "one optimiser step for every policy"
    return step.metrics
