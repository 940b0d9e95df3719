from __future__ import annotations

from pathlib import Path

from tests.support.episodes import episode, group, turn

from kapelle.cli.running import Report, learned
from kapelle.training.console import Point, ShownConversation
from kapelle.types import Group, Task

BEFORE = Point(0, 0.542, (0.498, 0.585), 500, {"actor": 0.542}, 500)
AFTER = Point(50, 0.946, (0.923, 0.963), 500, {"actor": 0.946}, 500)
WAS = ShownConversation("47+85", (("reasoner", "2,11"), ("actor", "122")), 0.0)
IS = ShownConversation("47+85", (("reasoner", "2,11+1"), ("actor", "132")), 1.0)
SECONDS = {"start": 1.0, "warm-up": 38.2, "training": 55.04, "evaluation": 3.0}


def report(before: Point | None = BEFORE, after: Point | None = AFTER, stopped_by: int = 0) -> Report:
    return Report(50, before, after, (WAS, IS), SECONDS, 821376, Path("runs/x"), "steps", stopped_by)


def test_a_report_reads_from_top_to_bottom() -> None:
    assert report().lines() == [
        "",
        "accuracy  54.2 % [49.8, 58.5]  →  94.6 % [92.3, 96.3]  scored 500 of 500 unseen problems, 95 % intervals",
        "before    47+85 → reasoner: 2,11 → actor: 122 → incorrect",
        "after     47+85 → reasoner: 2,11+1 → actor: 132 → correct",
        "time      warm-up 38.2 s, training 55.0 s, evaluation 3.0 s",
        "run       runs/x",
        "see it    kapelle view runs/x",
        "measure   kapelle eval runs/x",
        "go on     kapelle train --resume runs/x training.steps=N",
    ]


def test_a_rate_over_few_of_the_problems_is_never_shown_without_their_number() -> None:
    one = Point(9, 1.0, (0.207, 1.0), 16, {"a": 1.0}, 1, 0, "what was said is not on record")
    none = Point(0, None, None, 16, {}, 0, 16, "EpisodeError: no answer")
    before, after = "no score, scored 0 of 16, 16 failed", "100.0 % [20.7, 100.0], scored 1 of 16"
    assert report(none, one).lines()[1:4] == [
        f"accuracy  {before}  →  {after}  on unseen problems, 95 % intervals",
        "          not scored: EpisodeError: no answer",
        "          not scored: what was said is not on record",
    ]
    row = report(none, one).row()
    assert (row["scored_before"], row["failed_before"], row["scored_after"], row["failed_after"]) == (
        0,
        16,
        1,
        0,
    )
    assert report(none, none).lines()[1] == (
        "accuracy  no score  →  no score  scored 0 of 16 unseen problems, 16 failed"
    )


def outcome(task: str, success: float | None, said: str, error: str | None = None) -> Group:
    return group(episode(turn("actor", 0, text=said), task=Task(task, task), success=success, error=error))


def test_the_shown_problem_was_wrong_and_became_right() -> None:
    before = [
        outcome("a", 1.0, "a0"),
        outcome("b", 0.0, "b0"),
        outcome("c", 0.0, "c0"),
        outcome("d", 0.0, "d0"),
    ]
    after = [
        outcome("a", 1.0, "a1"),
        outcome("b", 0.0, "b1"),
        outcome("c", 1.0, "c1"),
        outcome("d", 1.0, "d1"),
    ]
    shown = learned(before, after)
    assert shown is not None
    assert [each.texts for each in shown] == [(("actor", "c0"),), (("actor", "c1"),)]


def test_a_failed_or_unscored_attempt_was_not_wrong_and_none_learned_is_none() -> None:
    assert learned([outcome("a", None, "x", error="broke")], [outcome("a", 1.0, "y")]) is None
    assert learned([outcome("a", None, "x")], [outcome("a", 1.0, "y")]) is None
    assert learned([outcome("a", 1.0, "x")], [outcome("a", 1.0, "y")]) is None
    assert learned([outcome("a", 0.0, "x")], [outcome("b", 1.0, "y")]) is None
