"""How well a verifier judges, by hand; on questions that no step trained; and what it takes before it may pay."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.copies import Copies
from tests.support.tiny import sections

from kapelle.errors import ConfigError
from kapelle.functional.calibration import read_calibration, sigmoid
from kapelle.functional.statistics import area_interval, area_under_curve
from kapelle.rows import turns_of
from kapelle.runs.named_checkpoint import check_verifier
from kapelle.runs.reader import read_episodes, read_evaluations
from kapelle.setup.recipe import resolve
from kapelle.training.held_out import Judged, held_out_tasks, judgement_of
from kapelle.training.selection import training_tasks
from kapelle.training.trainer import Trainer


def answers(question: str, *pairs: tuple[float, bool]) -> list[Judged]:
    return [Judged(question, said, right) for said, right in pairs]


class TestJudgement:
    def test_by_hand(self) -> None:
        found = judgement_of(
            [
                *answers("a", (0.9, True), (0.25, True), (0.5, False)),
                *answers("b", (0.05, False), (0.15, True)),
                *answers("c", (0.2, False)),
            ]
        )
        # Right 0.9, 0.25, 0.15 against wrong 0.5, 0.05, 0.2: 3 + 2 + 1 of 9 pairs.
        assert found.auc == pytest.approx(6 / 9)
        # 1 of 2 pairs of a, the one of b; c has no right answer.
        assert found.both == 2
        assert found.auc_within == pytest.approx((0.5 + 1.0) / 2)
        assert found.brier == pytest.approx((0.01 + 0.5625 + 0.25 + 0.0025 + 0.7225 + 0.04) / 6)
        # [0, .1): .05 against 0; [.1, .2): .15 against 1; [.2, .3): .225 against 1/2 (two); .5 against 0; .9 against 1.
        assert found.calibration_error == pytest.approx((0.05 + 0.85 + 2 * 0.275 + 0.5 + 0.1) / 6)
        assert (found.questions, found.answers, found.right) == (3, 6, 0.5)

    def test_who_knows_which_questions_are_hard_cannot_judge_answers(self) -> None:
        judged = [
            each for k in range(20) for each in answers(f"{k}", *[(k / 20, n < k // 2) for n in range(10)])
        ]
        found = judgement_of(judged)
        assert found.auc is not None
        assert found.auc > 0.8
        assert found.auc_within == 0.5

    def test_who_tells_garbled_texts_alone_is_at_chance_among_answers(self) -> None:
        # Garbled texts score low and are wrong; of the answers right and wrong ones score alike.
        judged = [
            Judged(f"{k}", score, right, answered)
            for k in range(10)
            for score, right, answered in (
                (0.1, False, False),
                (0.2, False, False),
                (0.8, True, True),
                (0.8, False, True),
            )
        ]
        found = judgement_of(judged)
        assert found.auc_within == pytest.approx(2.5 / 3)
        assert found.answered is not None
        assert (found.answered["auc_within"], found.answered["answers"]) == (0.5, 20)
        assert judgement_of([each for each in judged if each.answered]).answered is None

    def test_calibrated_on_half_of_the_questions_it_is_measured_on_the_others(self) -> None:
        # Three in four are right wherever it says nearly one.
        judged = [
            Judged(f"{k}", sigmoid(score), right, True, score)
            for k in range(200)
            for score, right in (
                (4.0, True),
                (4.0, True),
                (4.0, k % 2 == 0),
                (4.0, k % 2 == 1),
                (-4.0, False),
            )
        ]
        found = judgement_of(judged, "isotonic")
        assert found.calibrated is not None
        assert found.calibrated["before"]["calibration_error"] == pytest.approx(
            0.8 * 0.232 + 0.2 * 0.018, abs=2e-3
        )
        assert found.calibrated["calibration_error"] < 0.01
        assert found.calibrated["fitted"] + found.calibrated["answers"] == 1000
        assert 300 < found.calibrated["fitted"] < 700
        made = read_calibration(found.calibrated["calibration"])
        assert made.probability(4.0) == pytest.approx(0.75)
        # It changes no area: the verifier's order is its own.
        assert found.auc == judgement_of(judged).auc


class TestInterval:
    def test_it_covers_the_truth_where_answers_to_a_question_are_alike(self) -> None:
        # Right ones are N(1, 1), wrong ones N(0, 1), and all of a question share half of that variance: AUC Φ(1/√2) = 0.7602.
        draw, covered, naive = random.Random(0), 0, 0
        for _ in range(200):
            scores, right, questions = [], [], []
            for question in range(40):
                common = draw.gauss(0, 0.5**0.5)
                for _ in range(8):
                    scores.append(common + draw.gauss(0, 0.5**0.5) + (question % 2))
                    right.append(question % 2 == 1)
                    questions.append(question)
            low, high = area_interval(scores, right, questions) or (1.0, 0.0)
            covered += low <= 0.76025 <= high
            low, high = area_interval(scores, right, range(len(scores))) or (1.0, 0.0)
            naive += low <= 0.76025 <= high
        assert 180 <= covered <= 199
        assert naive < 160, "answers counted as if they were independent promise too much"

    def test_delongs_variance_by_hand(self) -> None:
        # Right 3, 1 and wrong 2, 0: area 3/4, shares (1, 1/2) and (1/2, 1), variance (1/8)/2 + (1/8)/2 = 1/8.
        scores, right = [3.0, 1.0, 2.0, 0.0], [True, True, False, False]
        low, high = area_interval(scores, right, range(4)) or (0.0, 0.0)
        assert area_under_curve(scores, right) == 0.75
        half = 1.959964 * (1 / 8) ** 0.5 / (0.75 * 0.25)
        odds = [3 * 2.718281828 ** (sign * half) for sign in (-1, 1)]
        assert (low, high) == pytest.approx(tuple(each / (1 + each) for each in odds), abs=1e-5)

    def test_nothing_out_of_order_is_no_certainty(self) -> None:
        low, high = area_interval([1.0, 2.0, 3.0, 4.0], [False, False, True, True], range(4)) or (0.0, 0.0)
        assert high == 1.0
        assert 0.2 < low < 0.5


class TestHeldOut:
    @pytest.mark.parametrize(
        "environment",
        [
            {"name": "tests.support.copies:Copies"},
            {"name": "arithmetic", "digits": 1},
            {"name": "tests.support.plugins:Digest", "tasks": 60},  # asks the same in both splits
        ],
    )
    def test_no_question_of_any_training_step_is_asked(self, environment: dict[str, Any]) -> None:
        config = resolve(sections(environment=environment, training={"steps": 5, "tasks_per_step": 6}))
        world: Any = config.environment
        trained = {task.question for step in range(1, 6) for task in training_tasks(world, config, step)}
        tasks = held_out_tasks(config, world, 5, 30)
        questions = [task.question for task in tasks]
        assert questions
        assert not trained & set(questions)
        assert len(set(questions)) == len(questions)
        assert all(task.id.startswith("test") for task in tasks)

    def test_a_run_measures_what_it_keeps_on_questions_that_it_never_played(self, tmp_path: Path) -> None:
        given = sections(
            environment={"name": "tests.support.copies:Copies", "letters": 3},
            workflow={"name": "solo"},
            algorithm={"name": "verifier", "data": "recorded", "group_size": 6},
            team={"sharing": "frozen", "agents": 1, "critic_lora": {"rank": 2}},
            training={"steps": 4, "tasks_per_step": 8},
            evaluation={"problems": 12, "before_and_after": False},
            checkpoint={"every": 2},
        )
        with Trainer(**given, run_dir=tmp_path) as run:
            run.train()
        rows = read_evaluations(tmp_path)
        assert [row["step"] for row in rows] == [2, 4]
        kept = json.loads((tmp_path / "checkpoints" / "00000004" / "verifier" / "verifier.json").read_text())
        assert kept["held_out"] == rows[-1]["verifier"]
        assert kept["held_out"]["questions"] == 12
        assert kept["held_out"]["answers"] == 72
        played = {e.task.question for step in range(1, 5) for e in read_episodes(tmp_path, step)}
        asked = {e.task.question for e in read_episodes(tmp_path, 4, split="test")}
        assert len(asked) == 12
        assert not asked & played


def judge_of(tmp_path: Path, **found: Any) -> Path:
    row = {
        "questions": 90, "answers": 800, "right": 0.4, "auc": 0.8, "both": 70,
        "auc_within": 0.66, "interval_within": [0.6, 0.72], **found,
    }  # fmt: skip
    (tmp_path / "verifier.json").write_text(json.dumps({"base": "", "held_out": row}))
    return tmp_path


class TestGate:
    def test_an_area_that_may_be_chance_is_not_enough(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"0\.750 \[0\.480"):
            check_verifier(judge_of(tmp_path, auc_within=0.75, interval_within=[0.48, 0.9]), 0.7)


def test_the_team_that_is_judged_answers_as_in_training() -> None:
    run = Trainer(
        **sections(
            environment=Copies(letters=3),
            workflow={"name": "debate", "rounds": 2, "score_rounds": True},
            algorithm={"name": "verifier", "group_size": 3},
            team={
                "sharing": "frozen",
                "agents": 2,
                "critic_lora": {"rank": 2},
                "sampling": {"max_tokens": 4},
            },
        )
    )
    result = run.evaluate(5)
    assert result.verifier is not None
    assert result.verifier["answers"] == 5 * 3 * 2 * 2
    said = [turn.completion_ids for _, turn in turns_of(result.groups, trained_only=False)]
    assert len(set(said)) > len(said) // 2, "sampled, not greedy"
    assert result is run.evaluate(5), "nothing has changed since"
