"""MAPoRL's rewards by hand: returns, all flips, agents that stop, verifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.episodes import episode, group, turn
from tests.support.tiny import SIZE, frozen_copy, learners_of, same_bits, sections

from kapelle.algorithms.maporl import MAPoRL
from kapelle.algorithms.signals.verifier import scores as verifier_scores
from kapelle.errors import ConfigError
from kapelle.rollout.evaluation.evaluate import verifier_metrics
from kapelle.rows import Signals, TurnKey
from kapelle.team import VERIFIER
from kapelle.training.trainer import Trainer
from kapelle.types import Episode, Group, Turn

ALPHA = (1.0, 10.0, 100.0, 1000.0)
"""Powers of ten, so that the digits of a reward name the terms in it."""


def debate(*rounds: Sequence[float | None], names: str = "abc") -> Episode:
    """Rounds of scores in team order; None where an agent is silent."""
    turns: list[Turn] = []
    for scores in rounds:
        for name, score in zip(names, scores, strict=False):
            if score is not None:
                turns.append(turn(name, len(turns), 1, score=score))
    return episode(*turns, agents=list(names[: len(rounds[0])]))


def paid(one: Episode, signals: Signals | None = None, **settings: Any) -> dict[str, list[float]]:
    """What every agent is paid, turn by turn."""
    rewards = MAPoRL(**settings).rewards([Group(one.task, (one,))], signals or Signals())
    return {agent: [rewards[TurnKey(0, 0, t.index)] for t in one.by(agent)] for agent in one.agents}


def near(expected: Mapping[str, Sequence[float]]) -> Any:
    return {agent: pytest.approx(list(values)) for agent, values in expected.items()}


class TestReturns:
    """Scores of a: 0.2, 0.4, 1; of b: 0.6, 0.8, 0.5; γ = ½. Means of the turns: 0.4, 0.6, 0.75."""

    DEBATE = debate((0.2, 0.6), (0.4, 0.8), (1.0, 0.5))

    def test_discounted_sum_of_all(self) -> None:
        # a: (0.2 + ½·0.6 + ¼·0.75)/1.75, (0.4 + ½·0.75)/1.5, 1
        a = [0.6875 / 1.75, 0.775 / 1.5, 1.0]
        b = [1.0875 / 1.75, 1.175 / 1.5, 0.5]
        assert paid(self.DEBATE, discount=0.5) == near({"a": a, "b": b})

    def test_discounted_sum_of_own_scores(self) -> None:
        a = [(0.2 + 0.5 * 0.4 + 0.25 * 1.0) / 1.75, (0.4 + 0.5 * 1.0) / 1.5, 1.0]
        b = [(0.6 + 0.5 * 0.8 + 0.25 * 0.5) / 1.75, (0.8 + 0.5 * 0.5) / 1.5, 0.5]
        assert paid(self.DEBATE, discount=0.5, sharing="individual") == near({"a": a, "b": b})

    def test_last(self) -> None:
        assert paid(self.DEBATE, horizon="last") == near({"a": [0.75] * 3, "b": [0.75] * 3})
        assert paid(self.DEBATE, horizon="last", sharing="individual") == near(
            {"a": [1.0] * 3, "b": [0.5] * 3}
        )

    def test_current(self) -> None:
        assert paid(self.DEBATE, horizon="current") == near({"a": [0.4, 0.6, 0.75], "b": [0.4, 0.6, 0.75]})
        own = near({"a": [0.2, 0.4, 1.0], "b": [0.6, 0.8, 0.5]})
        assert paid(self.DEBATE, horizon="current", sharing="individual") == own

    def test_the_advantage_of_a_turn_is_its_return_alone(self) -> None:
        algorithm = MAPoRL(discount=0.5, gae={"gamma_turn": 0.0, "normalise": "none"}).build()
        values = {TurnKey(0, 0, t.index): torch.tensor([0.25]) for t in self.DEBATE.turns}
        assert algorithm.credit is not None
        given = algorithm.credit([group(self.DEBATE)], Signals(values))
        got = [float(given[TurnKey(0, 0, t.index)].advantage_T) for t in self.DEBATE.by("a")]
        assert got == pytest.approx([0.6875 / 1.75 - 0.25, 0.775 / 1.5 - 0.25, 0.75])
        assert MAPoRL().gae.gamma_turn == 0.0


# own before, other before, own after, other after → what influence adds to my first and second turn.
FLIPS = [
    ((0, 0, 0, 0), (0, 0)),
    ((0, 0, 0, 1), (1000, 0)),
    ((0, 0, 1, 0), (0, 10)),
    ((0, 0, 1, 1), (1000, 10)),
    ((0, 1, 0, 0), (-100, 0)),
    ((0, 1, 0, 1), (0, 0)),
    ((0, 1, 1, 0), (-100, 1)),
    ((0, 1, 1, 1), (0, 1)),
    ((1, 0, 0, 0), (0, -1)),
    ((1, 0, 0, 1), (100, -1)),
    ((1, 0, 1, 0), (0, 0)),
    ((1, 0, 1, 1), (100, 0)),
    ((1, 1, 0, 0), (-1000, -10)),
    ((1, 1, 0, 1), (0, -10)),
    ((1, 1, 1, 0), (-1000, 0)),
    ((1, 1, 1, 1), (0, 0)),
]


def influence(one: Episode, **settings: Any) -> dict[str, list[float]]:
    """What influence alone adds to every turn."""
    with_it, without = paid(one, influence=ALPHA, **settings), paid(one, **settings)
    return {a: [round(x - y, 9) for x, y in zip(with_it[a], without[a], strict=True)] for a in with_it}


@pytest.mark.parametrize(("flip", "bonus"), FLIPS)
def test_all_sixteen_flips(flip: tuple[int, int, int, int], bonus: tuple[float, float]) -> None:
    own_before, other_before, own_after, other_after = map(float, flip)
    seen = influence(debate((own_before, other_before), (own_after, other_after)))
    assert seen["a"] == list(bonus)
    mirrored = influence(debate((other_before, own_before), (other_after, own_after)))
    assert mirrored["b"] == list(bonus)


def test_a_score_of_one_half_is_not_right() -> None:
    assert influence(debate((0.5, 0.5), (0.51, 0.5)))["a"] == [0, 10]


class TestAgentsThatStop:
    """b says something right once and falls silent; a is wrong, wrong, then right."""

    DEBATE = debate((0.0, 1.0), (0.0, None), (1.0, None))

    def test_its_last_answer_stays_valid(self) -> None:
        # Means of the turns ½, ½, 1. a: (0 + ½ + 1)/3, (0 + 1)/2, 1; b's one turn: (1 + ½ + 1)/3.
        assert paid(self.DEBATE) == near({"a": [0.5, 0.5, 1.0], "b": [2.5 / 3]})

    def test_later_influence_is_placed_on_the_last_turn(self) -> None:
        # a: ✗→✓ with the other right, +α0 on the third turn. b was right: +α2, on its only turn.
        assert influence(self.DEBATE) == {"a": [0, 0, 1], "b": [100]}

    def test_an_agent_without_turns_is_excluded(self) -> None:
        silent = debate((1.0, None), (1.0, None))
        assert paid(silent, influence=ALPHA) == near({"a": [1.0, 1.0], "b": []})

    def test_one_that_comes_late_has_its_first_turn_first(self) -> None:
        late = debate((1.0, None), (1.0, 0.0))
        assert paid(late, horizon="current", sharing="individual") == near({"a": [1.0, 1.0], "b": [0.0]})


class TestVerifiers:
    DEBATE = debate((0.0, 0.0), (1.0, 0.0))
    """As the environment scores it."""
    VERIFIED = Signals(score={TurnKey(0, 0, k): v for k, v in enumerate((0.9, 0.2, 0.8, 0.6))})

    def test_a_verifier_s_score_takes_precedence_over_the_environment_s(self) -> None:
        own = paid(self.DEBATE, self.VERIFIED, horizon="current", sharing="individual")
        assert own == near({"a": [0.9, 0.8], "b": [0.2, 0.6]})

    def test_correctness_is_the_verifier_s_score_or_the_label(self) -> None:
        for correctness, bonus in (("score", 100.0), ("label", 0.0)):
            settings: dict[str, Any] = {
                "horizon": "current",
                "sharing": "individual",
                "correctness": correctness,
            }
            got = paid(self.DEBATE, self.VERIFIED, influence=ALPHA, **settings)
            # By the verifier a was right and b found out: +α2. By the label a was wrong and b stayed wrong.
            assert got["a"][0] == pytest.approx(0.9 + bonus)

    def test_a_missing_score_names_the_settings(self) -> None:
        with pytest.raises(ConfigError, match=r"score_rounds: true.*algorithm\.verifier"):
            paid(episode(turn("a", 0)))


def run_of(algorithm: dict[str, Any] | None = None, **over: Any) -> Trainer:
    return Trainer(
        **sections(
            **{
                "environment": {"name": "tests.support.copies:Copies"},
                "workflow": {"name": "debate", "score_rounds": True},
                "algorithm": {"name": "maporl", "influence": [0.1, 0.1, 0.1, 0.1], **(algorithm or {})},
                "training": {"steps": 2, "tasks_per_step": 2},
                **over,
            }
        )
    )


def test_metrics_report_a_verifier_s_scores_and_accuracy() -> None:
    # The environment: ✗ ✗ ✓ ✗. Scores 0.9 0.2 0.8 0.6: of the three wrong turns the right one beats two.
    row = verifier_metrics([group(TestVerifiers.DEBATE)], TestVerifiers.VERIFIED.score)
    assert row == near_row({"verifier_score/a": 0.85, "verifier_score/b": 0.4, "verifier_auc": 2 / 3})


def near_row(expected: Mapping[str, float]) -> Any:
    return {name: pytest.approx(value) for name, value in expected.items()}


class TestRuns:
    def test_a_debate_without_scores_raises_an_error_before_a_model_loads(self) -> None:
        with pytest.raises(ConfigError, match=r"workflow.score_rounds: true"):
            run_of(workflow={"name": "debate"})

    @pytest.mark.sample(2)
    @pytest.mark.slow
    @pytest.mark.parametrize("sharing", ["lora", "shared"])
    def test_a_verifier_scores_turns_and_stays_frozen(self, tmp_path: Path, sharing: str) -> None:
        judge = Trainer(
            **sections(
                environment={"name": "tests.support.copies:Copies"},
                workflow={"name": "solo"},
                algorithm={"name": "verifier", "data": "recorded", "balance": "none"},
                team={"sharing": "frozen", "agents": 1, "critic_lora": {"rank": 2, "alpha": 4.0}},
                training={"steps": 2, "tasks_per_step": 8},
                model={"embedded": SIZE},
            )
        )
        for _ in judge.steps():
            pass
        judge.save_policies(tmp_path)
        team = {
            "sharing": sharing,
            "agents": 2,
            "lora": {"rank": 2, "alpha": 4.0},
            "sampling": {"max_tokens": 4},
        }
        run = run_of(
            {"verifier": str(tmp_path / "verifier"), "least_auc": None},
            team=team,
            workflow={"name": "debate"},
        )
        critic = run.team.critics[VERIFIER]
        before = frozen_copy(run.models[critic.base].bank.parameters(VERIFIER))
        assert same_bits(before, frozen_copy(judge.models["base"].bank.parameters(VERIFIER)))
        step = next(run.steps(1))
        assert {"verifier_score/agent_0", "verifier_score/agent_1"} < step.metrics.keys()
        scored = verifier_scores(step.groups, run.engine)
        assert len(scored) == 2 * 2 * 2
        assert all(0.0 < value < 1.0 for value in scored.values())
        next(run.steps(1))
        assert same_bits(before, frozen_copy(run.models[critic.base].bank.parameters(VERIFIER)))
        assert scored == verifier_scores(step.groups, run.engine), "the base under it is not trained either"
        assert VERIFIER not in learners_of(run.engine)


def test_several_verifiers_are_not_refreshed() -> None:
    MAPoRL.model_validate({"verifier": ["one"], "refresh": {"share": 0.5}})
    with pytest.raises(ValueError, match="lists several"):
        MAPoRL.model_validate({"verifier": ["one", "other"], "refresh": {"share": 0.5}})
    with pytest.raises(ValueError, match=r"`verifier` is an empty list"):
        MAPoRL.model_validate({"verifier": []})


def by_round(groups: Sequence[Group]) -> list[float]:
    """Share of right answers in the first and in the second round."""
    scores: tuple[list[float], list[float]] = ([], [])
    for members in groups:
        for one in members.episodes:
            for agent in one.agents:
                for told, each in zip(scores, one.by(agent), strict=True):
                    told.append(each.score or 0.0)
    return [sum(told) / len(told) for told in scores]


@pytest.mark.long
def test_a_debate_learns_to_share_private_information() -> None:
    """Ada is told a bit, ben is not. The best first round is right in ¾ of the answers, the best second in all."""
    whole = {"model": "embedded", "train": "full"}
    run = Trainer(
        **sections(
            environment={"name": "tests.support.whisper:Whisper"},
            workflow={"name": "debate", "rounds": 2, "score_rounds": True, "reply": "{answers}"},
            algorithm={"name": "maporl", "group_size": 32},
            team={
                "agents": [{"name": name, "weights": whole} for name in ("ada", "ben")],
                "sampling": {"max_tokens": 1},
            },
            model={"embedded": {**SIZE, "hidden": 32, "intermediate": 64}},
            training={"steps": 48, "tasks_per_step": 2},
            optimizer={"lr": 3e-3},
        )
    )
    rounds = [by_round(step.groups) for step in run.steps()]
    first = [sum(pair[k] for pair in rounds[:3]) / 3 for k in range(2)]
    last = [sum(pair[k] for pair in rounds[-5:]) / 5 for k in range(2)]
    assert first == pytest.approx([0.5, 0.5], abs=0.08)
    assert last[0] == pytest.approx(0.75, abs=0.08)
    assert last[1] >= 0.9
