"""COMA by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.episodes import episode, group, turn

from kapelle.algorithms.coma import COMA
from kapelle.algorithms.signals.counterfactual import COUNTERFACTUAL
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group


def pair(reward: float) -> Episode:
    """a speaks, then b; the team earns as much."""
    return episode(turn("a", 0, 2), turn("b", 1, 3), rewards={"b": reward})


GROUPS = [group(pair(1.0), pair(0.0), pair(0.0))]
VALUES = {(0, 0): 0.6, (0, 1): 0.9, (1, 0): 0.5, (1, 1): 0.2, (2, 0): 0.1, (2, 1): 0.4}
INSTEAD = {
    (0, 0): [0.5, 0.1],
    (1, 0): [0.6, 0.1],
    (2, 0): [0.6, 0.5],
    (0, 1): [0.4],
    (1, 1): [],
    (2, 1): [0.8],
}


def signals() -> Signals:
    values = {TurnKey(0, e, t): torch.tensor([value]) for (e, t), value in VALUES.items()}
    instead = {TurnKey(0, e, t): torch.tensor(list(found)) for (e, t), found in INSTEAD.items()}
    return Signals(values=values, more={COUNTERFACTUAL: instead})


def credit(groups: list[Group] = GROUPS, **settings: Any) -> dict[tuple[int, int], list[float]]:
    give = COMA(normalise="none", **settings).build().credit
    assert give is not None
    return {
        (key.episode, key.turn): each.advantage_T.tolist() for key, each in give(groups, signals()).items()
    }


def test_advantages_of_two_agents_by_hand() -> None:
    found = credit(worth="value")
    # 0.6 − (0.5 + 0.1)/2, for both of its tokens, and so on. b's turn in episode 1 has no alternative to its own prompt: 0.2 is
    # compared with b's other turns, 0.9 and 0.4.
    by_hand = {(0, 0): 0.3, (1, 0): 0.15, (2, 0): -0.45, (0, 1): 0.5, (1, 1): -0.45, (2, 1): -0.4}
    for (e, t), advantage in by_hand.items():
        assert found[e, t] == pytest.approx([advantage] * (2 + t))


def test_with_returns_the_critic_only_sets_the_baseline() -> None:
    found = credit()
    # Earned 1, 0 and 0, by both agents.
    by_hand = {(0, 0): 0.7, (1, 0): -0.35, (2, 0): -0.55, (0, 1): 0.6, (1, 1): -0.65, (2, 1): -0.8}
    for (e, t), advantage in by_hand.items():
        assert found[e, t] == pytest.approx([advantage] * (2 + t))


def test_what_partners_earn_cancels_where_the_critic_is_right() -> None:
    """An additive team of four that moves at once: each is told what it earned itself, less what its own others did."""
    earned = {0: (1.0, 5.0, -3.0, 8.0), 1: (3.0, 0.0, 2.0, -6.0), 2: (2.0, 4.0, 4.0, 1.0)}
    played = [
        episode(
            *(turn(name, k, 1, completed_before=0, prompt_ids=(k,)) for k, name in enumerate("abcd")),
            rewards={"a": sum(own)},
        )
        for own in earned.values()
    ]
    values, instead = {}, {}
    for e, own in earned.items():
        for k in range(4):
            values[TurnKey(0, e, k)] = torch.tensor([sum(own)])
            others = [earned[other][k] for other in earned if other != e]
            instead[TurnKey(0, e, k)] = torch.tensor([sum(own) - own[k] + other for other in others])
    for worth in ("return", "value"):
        give = COMA(normalise="none", team_reward="sum", worth=worth).build().credit
        assert give is not None
        found = give([group(*played)], Signals(values=values, more={COUNTERFACTUAL: instead}))
        for key, each in found.items():
            own_words = [earned[e][key.turn] for e in earned if e != key.episode]
            assert float(each.advantage_T[0]) == pytest.approx(
                earned[key.episode][key.turn] - sum(own_words) / 2
            )


def test_the_critic_s_target_is_the_return_from_the_turn_on() -> None:
    turns = (turn("a", 0, 2, reward=0.5), turn("a", 1, 2, reward=0.25))
    groups = [group(episode(*turns, rewards={"a": 1.0}), episode(*turns, rewards={"a": 0.0}))]
    values = {TurnKey(0, e, t): torch.tensor([0.0]) for e in (0, 1) for t in (0, 1)}
    more = {COUNTERFACTUAL: {key: torch.zeros(0) for key in values}}
    give = COMA().build().credit
    assert give is not None
    found = give(groups, Signals(values=values, more=more))
    targets = {(key.episode, key.turn): each.return_T for key, each in found.items()}
    assert {key: None if each is None else each.tolist() for key, each in targets.items()} == {
        (0, 0): [1.75],
        (0, 1): [1.25],
        (1, 0): [0.75],
        (1, 1): [0.25],
    }


def test_alone_in_its_step_a_turn_is_compared_with_nothing() -> None:
    failed = Episode(pair(0.0).task, 0, ("a", "b"), error="EpisodeError: gone")
    give = COMA(normalise="none", worth="value").build().credit
    assert give is not None
    lone = {key: torch.zeros(0) for key in (TurnKey(0, 0, 0), TurnKey(0, 0, 1))}
    values = {key: torch.tensor([0.75]) for key in lone}
    found = give([group(pair(1.0), failed)], Signals(values=values, more={COUNTERFACTUAL: lone}))
    assert {float(each.advantage_T[0]) for each in found.values()} == {0.75}
    assert give([group(failed, failed)], Signals(more={COUNTERFACTUAL: {}})) == {}


def test_a_masked_turn_leaves_the_loss_and_teaches_the_critic() -> None:
    cut = episode(turn("a", 0, 2, finish_reason="length"), turn("b", 1, 3), rewards={"b": 1.0})
    give = COMA(truncated="mask").build().credit
    assert give is not None
    found = give([group(cut, pair(0.0), pair(0.0))], signals())
    assert found[TurnKey(0, 0, 0)].weight == 0.0
    assert found[TurnKey(0, 0, 0)].return_T is not None


def test_its_advantages_are_whitened_over_each_policy_s_turns() -> None:
    give = COMA().build().credit
    assert give is not None
    found = give(GROUPS, signals())
    for t in (0, 1):
        own = [float(each.advantage_T[0]) for key, each in found.items() if key.turn == t]
        assert sum(own) == pytest.approx(0.0, abs=1e-5)
        assert sum(a * a for a in own) == pytest.approx(len(own), rel=0.6)
