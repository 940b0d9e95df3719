from __future__ import annotations

import sys

import pytest
from tests.support.episodes import episode, group, turn

from kapelle.rollout.evaluation.evaluate import Evaluation
from kapelle.training.console import (
    Lines,
    ProgressLine,
    ShownConversation,
    Watch,
    conversation,
)
from kapelle.training.step_report import Step
from kapelle.types import Episode, Task


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def attempt(name: str, sample: int) -> Episode:
    said = turn("solver", 0, text=f"{name}/{sample}")
    return episode(said, task=Task(name, name), rewards={"solver": 1.0}, success=1.0)


GROUPS = tuple(group(*(attempt(f"q{g}", k) for k in range(2))) for g in range(6))


def test_time_goes_to_the_phase_that_was_running() -> None:
    clock = Clock()
    watch = Watch(lambda _progress: None, clock)
    for second, phase in (
        (1, "warm-up"),
        (5, "evaluation"),
        (7, "training"),
        (10, "evaluation"),
        (11, "training"),
    ):
        clock.now = second
        watch.phase(phase, "")
    clock.now = 15
    assert watch.seconds() == {"start": 1, "warm-up": 4, "evaluation": 3, "training": 7}


def test_a_view_sees_every_change_in_order_and_as_a_whole() -> None:
    seen: list[ProgressLine] = []
    watch = Watch(seen.append)
    watch.phase("warm-up", "teaching")
    watch.warmup(3, 9, {"nll/shared": 1.5})
    watch.phase("training", "grpo")
    watch.step(Step(1, GROUPS, {"return/solver": 0.25, "success": 0.5, "time/step": 2.0}), 4)
    watch.evaluation(1, Evaluation(10, 0.5, (0.2, 0.8), {"solver": 0.5}, 3.0, 0, 10))
    watch.phase("evaluation", "unseen problems")
    assert [(p.event, p.phase, p.step, p.steps) for p in seen] == [
        ("phase", "warm-up", 0, 0),
        ("warmup", "warm-up", 3, 9),
        ("phase", "training", 0, 0),  # the bar of the warm-up is not training's
        ("step", "training", 1, 4),
        ("evaluation", "training", 1, 4),
        ("phase", "evaluation", 1, 4),  # while training's continues after an evaluation
    ]
    last = seen[-1]
    assert last.rewards == {"solver": 0.25}
    assert last.history == (0.5,)
    assert [(point.step, point.success, point.problems) for point in last.points] == [(1, 0.5, 10)]
    assert seen[3].points == ()


def test_without_a_team_score_the_history_is_the_mean_reward() -> None:
    watch = Watch(lambda _progress: None)
    watch.step(Step(1, GROUPS, {"return/a": 1.0, "return/b": 0.0}), 2)
    watch.step(Step(2, GROUPS, {"return/a": 1.0, "return/b": 1.0}), 2)
    assert watch.now.history == (0.5, 1.0)


def test_a_conversation_tells_who_said_what_and_how_it_ended() -> None:
    said = (turn("reasoner", 0, text="2,11+1"), turn("actor", 1, text="132"))
    task = Task("t", "47+85")
    assert conversation(episode(*said, task=task, success=1.0)) == ShownConversation(
        "47+85", (("reasoner", "2,11+1"), ("actor", "132")), 1.0
    )
    game = episode(*said, task=task, rewards={"reasoner": 3.0, "actor": 1.0})
    assert (conversation(game).score, conversation(game).returns) == (None, {"reasoner": 3.0, "actor": 1.0})
    broke = conversation(episode(*said, task=task, success=1.0, error="broke"))
    assert (broke.score, broke.note) == (None, "failed")


def test_what_is_left_follows_from_the_pace_of_the_last_steps(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    watch = Watch(Lines(sys.stdout, clock), clock)
    watch.phase("training", "grpo")
    left = []
    for number, second in enumerate((10.0, 70.0, 130.0, 190.0), start=1):
        clock.now = second
        watch.step(Step(number, (), {}), 4)
        left.append(watch.now.left)
    assert left == [None, 120.0, 60.0, None]
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith(" left") for line in lines] == [False, False, True, True, False]
    assert lines[2].endswith("  2:00 left")
