"""Steps that have nothing to learn from say so, and a run that can never learn ends with the reason."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.tiny import tiny_model

import kapelle
from kapelle.algorithm import Algorithm
from kapelle.algorithms import DPO, GRPO, MAPPO, SFT, Verifier
from kapelle.environments import Rewarded
from kapelle.environments.rewarded import Reward, RowsInMemory, rows_in_memory
from kapelle.errors import TrainingHalted
from kapelle.runtime.plugins import IN_MEMORY
from kapelle.training.console import Lines, Watch
from kapelle.training.step_report import LONG, IdleSteps, Step, why_idle

ROWS = [{"question": str(k), "answer": "ab"[k % 2]} for k in range(12)]


def same(completion: str) -> float:
    return 1.0


def nothing(completion: str) -> None:
    return None


def one_in_two(question: str, completion: str) -> float | None:
    return float(len(completion)) + hash(completion) % 7 if int(question) % 2 else None


def run(reward: Any, algorithm: Any, steps: int = 1) -> tuple[kapelle.Summary, str]:
    stream = io.StringIO()
    with kapelle.train(
        tiny_model(),
        ROWS,
        reward,
        team={"sampling": {"max_tokens": 2}, "lora": {"rank": 2}},
        training={"tasks_per_step": 2},
        algorithm=algorithm,
        steps=steps,
        run_dir=None,
        observer=Watch(Lines(stream)),
    ) as trained:
        return trained.summary, stream.getvalue()


def test_a_step_of_preferences_without_a_pair_says_so_before_it_names_a_reward() -> None:
    summary, shown = run(same, DPO(group_size=2))
    idle = "nothing to learn from: no pairs, because all episodes of each task have equal returns"
    assert f"step 1/1  {idle}  reward agent_0 1.000" in shown
    assert f"last step  {idle}  reward/agent_0 1" in str(summary)


def test_equal_rewards_of_a_redrawn_step_are_named_once() -> None:
    summary, shown = run(same, GRPO(group_size=2, redraw=1))
    assert shown.count("all episodes of each task have the same return") == 1
    assert summary.idle == "all episodes of each task have the same return"


@pytest.mark.parametrize("algorithm", [GRPO(group_size=2), MAPPO(group_size=2)])
def test_a_function_that_says_nothing_has_no_reward_and_ends_the_run(algorithm: Any) -> None:
    summary, shown = run([nothing], algorithm)
    assert "step 1/1  nothing to learn from: no episode was scored  scored 0 of 4  " in shown
    assert "reward agent_0" not in shown, "nobody knows what an episode earned that nobody scored"
    assert "learning: the reward function `nothing` scored 0 of 4 episodes of step 1" in shown
    assert summary.idle == "no episode was scored"


def test_a_run_that_nobody_scores_ends_after_a_stretch_with_the_reason() -> None:
    with pytest.raises(
        TrainingHalted, match=f"No episode of the last {LONG} steps was scored.*Return a number"
    ):
        run(nothing, DPO(group_size=2), LONG + 1)


def test_a_function_that_scores_some_is_counted_and_the_run_goes_on() -> None:
    summary, shown = run([one_in_two, same], GRPO(group_size=2), 3)
    assert shown.count("the reward function `one_in_two` scored") == 1
    assert "`same`" not in shown
    assert summary.steps == 3


def test_a_trainer_that_nobody_watches_warns() -> None:
    rewarded = Rewarded(path=IN_MEMORY, eval_path="none", rewards=(Reward(function=f"{IN_MEMORY}:nothing"),))
    environment = rewarded.holding(RowsInMemory(rows_in_memory(ROWS, "dataset"), (), {"nothing": nothing}))
    with (
        kapelle.Trainer(
            model=tiny_model(),
            environment=environment,
            team={"agents": 1, "sampling": {"max_tokens": 2}, "lora": {"rank": 2}},
            workflow={"name": "solo"},
            algorithm=DPO(group_size=2),
            training={"tasks_per_step": 1, "steps": 1},
            evaluation={"before_and_after": False},
        ) as trainer,
        pytest.warns(UserWarning, match="`nothing` scored 0 of 2 episodes of step 1"),
    ):
        trainer.train()


ADVANTAGES = {"advantage/a": 0.0, "advantage_std/a": 0.0, "samples": 4.0}


@pytest.mark.parametrize(
    ("made", "row", "updated", "said"),
    [
        (GRPO, ADVANTAGES, True, "every advantage is 0"),
        (GRPO, {**ADVANTAGES, "dead_groups": 1.0}, True, "all episodes of each task have the same return"),
        (GRPO, {**ADVANTAGES, "failed_episodes": 1.0}, False, "every episode failed"),
        (GRPO, {**ADVANTAGES, "advantage_std/a": 0.1}, True, ""),
        (GRPO, {**ADVANTAGES, "unscored": 3.0, "failed_episodes": 0.25}, True, "no episode was scored"),
        (MAPPO, {**ADVANTAGES, "dead_groups": 1.0}, True, ""),
        (MAPPO, {"samples": 4.0, "unscored": 4.0}, True, "no episode was scored"),
        (SFT, {"samples": 4.0}, False, "no demonstration has a turn of a trained agent"),
        (SFT, {"samples": 4.0}, True, ""),
        (Verifier, {"samples": 4.0}, False, "no question has both a correct and an incorrect answer"),
    ],
)
def test_why(made: Callable[[], Any], row: dict[str, float], updated: bool, said: str) -> None:
    algorithm: Algorithm = made().build()
    assert why_idle(algorithm, row, updated=updated, judged=False) == said


def test_scores_of_a_model_are_something_to_learn_from() -> None:
    row = {**ADVANTAGES, "advantage_std/a": 1.0, "unscored": 4.0}
    assert why_idle(GRPO().build(), row, updated=True, judged=True) == ""


def test_a_stretch_is_told_once_until_a_step_learns() -> None:
    said: list[str] = []
    steps = IdleSteps(said.append)
    idle = Step(1, (), {}, idle="all episodes of each task have the same return")
    for number in range(1, 3 * LONG):
        steps.note(replace(idle, number=number))
    assert len(said) == 1
    assert said[0].startswith(f"{LONG} steps in a row had nothing to learn from: all episodes")
    steps.note(Step(1, (), {}))
    for _ in range(LONG):
        steps.note(idle)
    assert len(said) == 2
