"""Steps that have nothing to learn from say so, and a run that can never learn ends with the reason."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from tests.support.tiny import tiny_model

import kapelle
from kapelle.algorithm import Algorithm
from kapelle.algorithms import DPO, GRPO, MAPPO, SFT, Verifier
from kapelle.errors import TrainingHalted
from kapelle.training.console import Lines, Watch
from kapelle.training.step_report import LONG, IdleSteps, Step, why_idle

ROWS = [{"question": str(k), "answer": "ab"[k % 2]} for k in range(12)]


def same(completion: str) -> float:
    return 1.0


def nothing(completion: str) -> None:
    return None


def run(
    reward: Any, algorithm: Any, steps: int = 1, sampling: Mapping[str, Any] = MappingProxyType({})
) -> tuple[kapelle.Summary, str]:
    stream = io.StringIO()
    with kapelle.train(
        tiny_model(),
        ROWS,
        reward,
        team={"sampling": {"max_tokens": 2, **sampling}, "lora": {"rank": 2}},
        training={"tasks_per_step": 2},
        algorithm=algorithm,
        steps=steps,
        run_dir=None,
        observer=Watch(Lines(stream)),
    ) as trained:
        return trained.summary, stream.getvalue()


@pytest.mark.sample(2)
@pytest.mark.parametrize("algorithm", [GRPO(group_size=2), MAPPO(group_size=2)])
def test_a_run_without_any_reward_says_so_within_ten_steps_and_what_to_try(algorithm: Any) -> None:
    _, shown = run(lambda completion: 0.0, algorithm, LONG + 1)
    early = shown[: shown.index(f"step {LONG}/")]
    assert early.count("starved: no completion has received a reward above 0 in 8 steps") == 1
    advice = early[early.index("what to do: ") :]
    assert all(word in advice for word in ("`warmup`", "`examples`", "easier split"))
    assert "consecutive steps" not in shown
    _, shown = run(lambda completion: float(sum(map(ord, completion)) % 2), algorithm, LONG)
    assert "starved" not in shown


def test_constrained_completions_that_are_cut_are_reported_once() -> None:
    _, shown = run(same, GRPO(group_size=8), 2, sampling={"max_tokens": 3, "regex": "a{1,9}"})
    assert shown.count("constrained completions of agent 'agent_0' in step") == 1
    assert "were cut off after 3 tokens. Set a higher `sampling.max_tokens`" in shown
    _, shown = run(same, GRPO(group_size=8), 2, sampling={"max_tokens": 3, "regex": "a{1,2}"})
    assert "constrained completions" not in shown


@pytest.mark.parametrize("algorithm", [GRPO(group_size=2), MAPPO(group_size=2)])
def test_a_function_that_says_nothing_has_no_reward_and_ends_the_run(algorithm: Any) -> None:
    summary, shown = run([nothing], algorithm)
    assert "step 1/1  nothing to learn from: no episode was scored  scored 0 of 4  " in shown
    assert "reward agent_0" not in shown, "nobody knows what an episode earned that nobody scored"
    assert "learning: the reward function `nothing` scored 0 of 4 episodes of step 1" in shown
    assert summary.idle == "no episode was scored"
    assert "scored 0 of 4" in str(summary)
    summary, _ = run(lambda completion: float(len(completion)), algorithm)
    assert "  return/agent_0 " in str(summary)
    assert "scored" not in str(summary), "nothing defines success, so that no count of it is missing"


def test_the_first_failures_of_episodes_are_reported_with_their_reason() -> None:
    calls = iter(range(100))

    def breaks_once(completion: str) -> float:
        if next(calls) == 2:
            raise ValueError("no such column")
        return 1.0

    _, shown = run(breaks_once, GRPO(group_size=4), steps=2)
    assert shown.count("ValueError: no such column") == 1
    assert "1 of 8 episodes of step 1 failed" in shown


def test_a_run_that_nobody_scores_ends_after_a_stretch_with_the_reason() -> None:
    with pytest.raises(
        TrainingHalted, match=f"No episode of the last {LONG} steps was scored.*Return a number"
    ):
        run(nothing, DPO(group_size=2), LONG + 1)


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


def test_a_stretch_is_told_once_until_a_step_learns() -> None:
    said: list[str] = []
    steps = IdleSteps(said.append, {}, said.append)
    idle = Step(1, (), {}, idle="all episodes of each task have the same return")
    for number in range(1, 3 * LONG):
        steps.note(replace(idle, number=number))
    assert len(said) == 1
    assert said[0].startswith(f"{LONG} consecutive steps had nothing to learn from: all episodes")
    steps.note(Step(1, (), {}))
    for _ in range(LONG):
        steps.note(idle)
    assert len(said) == 2
