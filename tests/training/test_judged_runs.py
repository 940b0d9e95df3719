"""Runs that judges pay: the reward follows the judge's rule, and a resumed run repeats its verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.judging import JudgingServer, judging
from tests.support.tiny import tiny_model

import kapelle
from kapelle.algorithms import GRPO
from kapelle.errors import TrainingHalted
from kapelle.runs.reader import read_episodes, read_metrics
from kapelle.types import Episode

ROWS = [{"question": str(k), "answer": "a"} for k in range(6)]
SMALL: Mapping[str, Any] = {
    "team": {"sampling": {"max_tokens": 3}, "lora": {"rank": 2}},
    "training": {"tasks_per_step": 2, "max_failed_share": 1.0},
    "algorithm": GRPO(group_size=3),
}


def rule(text: str) -> int:
    return sum(map(ord, text)) % 11


def rubric(server: JudgingServer, **more: Any) -> kapelle.Rubric:
    criteria = {"clear": "Is it clear?", "right": {"asks": "Is it right?", "weight": 2}}
    return kapelle.Rubric(rubric=criteria, judge={**server.settings, **more})


def ranking(server: JudgingServer, **more: Any) -> kapelle.Ranking:
    return kapelle.Ranking(rank="The better one.", judge={**server.settings, **more})


def episodes(run: Path, steps: int) -> list[Episode]:
    return [each for step in range(1, steps + 1) for each in read_episodes(run, step, "train")]


def said(episode: Episode) -> str:
    return episode.turns[-1].text


def worth(text: str) -> float:
    return rule(text.strip()) / 10 if any(letter.isalnum() or letter == "_" for letter in text) else 0.0


def test_what_a_judge_says_is_what_agents_earn(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with (
        judging(rule) as server,
        kapelle.train(
            tiny_model(),
            ROWS,
            [rubric(server), ranking(server)],
            reward_weights=[1, 0.5],
            run_dir=run_dir,
            steps=2,
            **SMALL,
        ),
    ):
        played = [each for each in episodes(run_dir, 2) if each.error is None]
        assert played
        for episode in played:
            graded, ranked = episode.info["reward/rubric"], episode.info["reward/rank"]
            assert graded == pytest.approx(worth(said(episode)))
            assert episode.info["reward/rubric/clear"] == pytest.approx(worth(said(episode)))
            assert isinstance(ranked, float)
            assert episode.rewards == {"agent_0": pytest.approx(worth(said(episode)) + 0.5 * ranked)}
        rows = [row for row in read_metrics(run_dir) if "judge/calls" in row]
        assert sum(row["judge/calls"] for row in rows) == server.asked
        assert {"reward_function/rubric", "reward_function/rubric/clear", "reward_function/rank"} <= rows[
            0
        ].keys()


def test_a_resumed_run_repeats_its_verdicts_without_asking(tmp_path: Path) -> None:
    straight, broken, cache = tmp_path / "straight", tmp_path / "broken", str(tmp_path / "verdicts.jsonl")

    def go(server: JudgingServer, run_dir: Path, steps: int, **more: Any) -> None:
        rewards: list[Any] = [rubric(server, cache=cache), ranking(server, cache=cache)]
        with kapelle.train(tiny_model(), ROWS, rewards, run_dir=run_dir, steps=steps, **SMALL, **more):
            pass

    with judging(rule) as server:
        go(server, straight, 3)
        asked = server.asked
        assert asked > 0
        go(server, broken, 1)
        go(server, broken, 3, resume=True)
        assert server.asked == asked, "every verdict was kept"
    first, again = episodes(straight, 3), episodes(broken, 3)
    assert [(said(each), each.rewards, each.info) for each in first] == [
        (said(each), each.rewards, each.info) for each in again
    ]


def test_a_run_whose_budget_is_spent_stops_with_the_reason_and_can_be_resumed(tmp_path: Path) -> None:
    run_dir, cache = tmp_path / "run", str(tmp_path / "verdicts.jsonl")
    with judging(rule) as server:
        with pytest.raises(TrainingHalted, match=r"judge\.budget"):
            kapelle.train(
                tiny_model(), ROWS, rubric(server, cache=cache, budget=8), run_dir=run_dir, steps=9, **SMALL
            )
        assert server.asked == 8
        done = len({row["step"] for row in read_metrics(run_dir) if "judge/calls" in row})
        with kapelle.train(
            tiny_model(),
            ROWS,
            rubric(server, cache=cache, budget=80),
            run_dir=run_dir,
            steps=done + 1,
            resume=True,
            **SMALL,
        ) as run:
            assert run.summary.steps == done + 1
