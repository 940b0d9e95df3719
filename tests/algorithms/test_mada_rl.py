"""MADA-RL: what an agent adds to the answers that it has read, by hand and in expectation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from experiments.tables import Words
from pydantic import ValidationError
from tests.support.episodes import episode, group, turn
from tests.support.expected import Game, expected_update, multiples

from kapelle.algorithms.mada_rl import MADARL
from kapelle.errors import AlgorithmError
from kapelle.rows import Signals
from kapelle.types import Episode, Group, Task, Turn


def advantages(groups: Sequence[Group], **settings: Any) -> list[float]:
    credit = MADARL(**settings).credit(groups, Signals())
    return [float(credit[key].advantage_T[0]) for key in sorted(credit)]


def debate(*rounds: Sequence[float]) -> Episode:
    """Rounds of simultaneous answers with their scores."""
    turns: list[Turn] = []
    for scores in rounds:
        before = len(turns)
        turns += [
            turn(name, before + k, completed_before=before, score=score)
            for k, (name, score) in enumerate(zip("abc", scores, strict=False))
        ]
    return episode(*turns, rewards=dict.fromkeys("abc", 9.0))


def test_a_debate_by_hand() -> None:
    groups = [group(debate((1.0, 0.0, 0.0), (1.0, 1.0, 0.0)), debate((0.0, 0.0, 1.0), (0.0, 1.0, 1.0)))]
    # First answers against the agent's first answer in the other episode; then each less the mean of the two it has read.
    assert advantages(groups) == [1.0, 0.0, -1.0, 1.0, 0.5, -0.5, -1.0, 0.0, 1.0, -0.5, 0.5, 1.0]


def test_an_aggregator_is_compared_with_the_drafts() -> None:
    def summary(drafts: Sequence[float], answer: float) -> Episode:
        turns = [turn(name, k, completed_before=0) for k, name in enumerate("ab")]
        return episode(*turns, turn("z", 2, 4), rewards={**dict(zip("ab", drafts, strict=True)), "z": answer})

    groups = [group(summary((1.0, 0.0), 1.0), summary((1.0, 1.0), 0.0))]
    assert advantages(groups) == [0.0, -1.0, 0.5, 0.0, 1.0, -1.0]
    # Penalties are part of the agent's own reward; what it has read counts as it was scored. z has written 4 tokens of 8.
    assert advantages(groups, penalties={"length": 0.5, "length_limit": 8})[2] == pytest.approx(0.25)


def test_answers_without_scores_raise_an_error() -> None:
    unscored = episode(turn("a", 0), turn("b", 1), turn("a", 2), rewards={"a": 1.0, "b": 1.0})
    with pytest.raises(AlgorithmError, match=r"turn 0 of agent 'a' has no score.*score_rounds: true"):
        advantages([group(unscored, unscored)])
    with pytest.raises(ValidationError, match="remove `team_reward`"):
        MADARL(team_reward="sum")


class Scored(Game):
    """Both answers are scored; b reads a's."""

    def episode(self, outcome: Sequence[int], task: Task) -> Episode:
        """Return one outcome with the scores of its turns."""
        played = super().episode(outcome, task)
        said = [self.words[k] for k in outcome]
        scores = (first(said), second(said))
        turns = tuple(replace(one, score=score) for one, score in zip(played.turns, scores, strict=True))
        return replace(played, turns=turns)


def first(said: Sequence[Words]) -> float:
    return {(0,): 0.25, (1, 0): 1.0, (1, 1): 0.0}[said[0]]


def second(said: Sequence[Words]) -> float:
    return float(said[0] != said[1]) if said[0] == (0,) else first(said[1:])


@pytest.mark.parametrize(("agent", "score"), [("a", first), ("b", second)])
def test_each_agent_follows_the_gradient_of_its_own_score(agent: str, score: Any) -> None:
    game = Scored(("a", "b"), lambda said: {agent: score(said)})
    tables, _ = expected_update(MADARL(group_size=2).build(), game)
    # J counts this agent's score alone: the update of its policy is a multiple of ∇J.
    assert multiples(tables)[agent] > 0
