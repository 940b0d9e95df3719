"""Reward sharing and placement for several agents, with agents that stop early or have no turn."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.episodes import episode, turn

from kapelle.algorithms.shared.rewards import (
    TeamReward,
    agent_returns,
    chain_rewards,
    round_rewards,
    turn_rewards,
)
from kapelle.types import Episode, RewardEvent

# a and b speak twice, c once, c last: a0 b1 a2 b3 c4
TURNS = [("a", 0), ("b", 1), ("a", 2), ("b", 3), ("c", 4)]


def played(rewards: dict[str, float], paid: dict[int, float] | None = None) -> Episode:
    paid = paid or {}
    return episode(*(turn(agent, k, reward=paid.get(k, 0.0)) for agent, k in TURNS), rewards=rewards)


class TestTerminal:
    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("mean", {"a": 2.0, "b": 2.0, "c": 2.0}),
            ("sum", {"a": 6.0, "b": 6.0, "c": 6.0}),
            ("max", {"a": 4.0, "b": 4.0, "c": 4.0}),
            ("min", {"a": -1.0, "b": -1.0, "c": -1.0}),
            ("last", {"a": 0.0, "b": 0.0, "c": 3.0}),
            ("individual", {"a": 4.0, "b": -1.0, "c": 3.0}),
            ("win", {"a": 1.0, "b": 0.0, "c": 0.0}),
        ],
    )
    def test_three_agents(self, how: TeamReward, expected: dict[str, float]) -> None:
        one = played({"a": 4.0, "b": -1.0, "c": 3.0})
        assert agent_returns(one, how) == expected
        # It stands on each agent's own last turn: a's is 2, b's 3, c's 4.
        placed = turn_rewards(one, how)
        assert placed == {0: 0.0, 1: 0.0, 2: expected["a"], 3: expected["b"], 4: expected["c"]}

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("mean", {"a": 1.0, "b": 1.0, "c": 1.0}),
            ("sum", {"a": 1.0, "b": 1.0, "c": 1.0}),
            ("last", {"a": 0.0, "b": 0.0, "c": 1.0}),
            ("individual", {"a": 0.0, "b": 0.0, "c": 1.0}),
        ],
    )
    def test_only_the_last_of_a_chain_is_scored(self, how: TeamReward, expected: dict[str, float]) -> None:
        assert agent_returns(played({"c": 1.0}), how) == expected

    def test_a_tie_and_a_lone_reward_have_no_winner(self) -> None:
        assert agent_returns(played({"a": 4.0, "b": 4.0, "c": 3.0}), "win") == {"a": 0.0, "b": 0.0, "c": 0.0}
        assert agent_returns(played({"c": 1.0}), "win") == {"a": 0.0, "b": 0.0, "c": 0.0}

    def test_a_scored_agent_without_turns_counts_in_the_mean(self) -> None:
        silent = episode(turn("a", 0), agents=("a", "d"), rewards={"a": 1.0, "d": 0.0})
        assert agent_returns(silent, "mean") == {"a": 0.5}
        assert agent_returns(silent, "individual") == {"a": 1.0}


class TestTurns:
    """Rewards between turns, each paid when its turn was over."""

    PAID: ClassVar = {0: 1.0, 1: 2.0, 2: 4.0, 3: -2.0, 4: 0.0}

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            # 1, 2, 4 and −2 after the turns a0, b1, a2, b3: each on everyone's last turn by then, or the first one.
            ("individual", {0: 1.0, 1: 2.0, 4: 0.0, 2: 4.0, 3: -2.0}),
            ("sum", {0: 3.0, 1: 7.0, 4: 5.0, 2: 2.0, 3: -2.0}),
            ("mean", {0: 1.0, 1: 7 / 3, 4: 5 / 3, 2: 2 / 3, 3: -2 / 3}),
            ("max", {0: 3.0, 1: 7.0, 4: 5.0, 2: 2.0, 3: -2.0}),
            ("min", {0: 3.0, 1: 7.0, 4: 5.0, 2: 2.0, 3: -2.0}),
            # c closed the episode and was paid nothing; it has no second turn.
            ("last", {0: 0.0, 1: 0.0, 4: 0.0, 2: 0.0, 3: 0.0}),
        ],
    )
    def test_each_moment_is_the_whole_team_s(self, how: TeamReward, expected: dict[int, float]) -> None:
        assert turn_rewards(played({}, self.PAID), how) == pytest.approx(expected)

    @pytest.mark.parametrize(("how", "each"), [("sum", 4.0), ("mean", 2.0), ("max", 4.0), ("min", 4.0)])
    def test_it_is_independent_of_an_agent_s_number_of_turns(self, how: TeamReward, each: float) -> None:
        # a, b, a, a paid 1 each: four in all, for both agents.
        one = episode(*(turn(agent, k, reward=1.0) for k, agent in enumerate("abaa")))
        assert agent_returns(one, how) == {"a": each, "b": each}

    @pytest.mark.parametrize(
        ("how", "expected"),
        [
            ("sum", {0: 0.0, 1: 4.0, 2: 16.0}),
            ("mean", {0: 0.0, 1: 2.0, 2: 8.0}),
            ("max", {0: 0.0, 1: 3.0, 2: 8.0}),
            ("min", {0: 0.0, 1: 1.0, 2: 8.0}),
            ("individual", {0: 1.0, 1: 11.0, 2: 8.0}),
        ],
    )
    def test_rewards_of_other_agents_count_from_the_move_on(
        self, how: TeamReward, expected: dict[int, float]
    ) -> None:
        # a b a; after b's move a gets 1 and b 3, after a's second one 8 each. b's 8 is booked on its turn 1.
        turns = (turn("a", 0, reward=1.0), turn("b", 1, reward=11.0), turn("a", 2, reward=8.0))
        reward_events = (
            RewardEvent("a", 2, 1.0),
            RewardEvent("b", 2, 3.0),
            RewardEvent("a", 3, 8.0),
            RewardEvent("b", 3, 8.0),
        )
        one = episode(*turns, reward_events=reward_events)
        if how == "individual":
            assert turn_rewards(one, how) == expected
        else:
            assert chain_rewards(one, how) == expected
            # Rounds: a0 b1 · a2.
            assert sum(round_rewards(one, how)[k] for k in (0, 1)) == expected[1]
            assert round_rewards(one, how)[2] == expected[2]

    def test_simultaneous_turns_are_rewarded_together(self) -> None:
        # b's prompt was fixed before a's turn was over: what both earn came after both.
        turns = (turn("a", 0, reward=1.0), turn("b", 1, reward=2.0, completed_before=0))
        assert chain_rewards(episode(*turns), "sum") == {0: 0.0, 1: 3.0}

    def test_turn_and_terminal_rewards_add_up(self) -> None:
        one = played({"a": 3.0, "b": 3.0, "c": 3.0}, {2: 1.0})
        assert turn_rewards(one, "individual") == {0: 0.0, 1: 0.0, 2: 4.0, 3: 3.0, 4: 3.0}
        assert agent_returns(one, "individual") == {a: one.total(a) for a in "abc"}


SPEECHES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(-4, 4)), min_size=1, max_size=8)


class TestOneNumber:
    """What the team earned is one number, whoever reads it: each agent's path, the chain, the rounds."""

    @settings(max_examples=100, deadline=None)
    @given(
        SPEECHES,
        st.dictionaries(st.sampled_from("abcd"), st.integers(-4, 4)),
        st.sampled_from(["sum", "mean", "max", "min"]),
    )
    def test_of_every_speaker_of_the_chain_and_of_the_rounds(
        self, speeches: list[tuple[str, int]], at_the_end: dict[str, int], how: TeamReward
    ) -> None:
        turns = [turn(agent, k, reward=float(paid)) for k, (agent, paid) in enumerate(speeches)]
        one = episode(*turns, agents="abcd", rewards={a: float(r) for a, r in at_the_end.items()})
        earned = sum(chain_rewards(one, how).values())
        assert sum(round_rewards(one, how).values()) == pytest.approx(earned)
        returns = agent_returns(one, how)
        assert returns == pytest.approx(dict.fromkeys(returns, earned))

    @given(
        st.dictionaries(st.sampled_from("abcde"), st.floats(-5, 5), min_size=1),
        st.sampled_from(["sum", "mean", "max", "min", "individual"]),
    )
    def test_whichever_agent_is_named_first(self, rewards: dict[str, float], how: TeamReward) -> None:
        turns = [turn(agent, k) for k, agent in enumerate("abcde")]
        one = episode(*turns, rewards=rewards)
        other = episode(*turns, rewards=dict(reversed(rewards.items())))
        assert agent_returns(one, how) == pytest.approx(agent_returns(other, how))

    def test_by_rounds_the_end_counts_for_each(self) -> None:
        # The judge speaks once, last in time: its turn is of round 0, and what is paid then of the last round.
        names = ("solver", "critic", "solver", "solver", "judge")
        one = episode(*(turn(name, k) for k, name in enumerate(names)), rewards={"judge": 0.5})
        assert round_rewards(one, "mean") == {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.5, 4: 0.0}

    def test_by_rounds_a_frozen_turn_s_reward_moves_to_the_previous_round(self) -> None:
        # Rounds: a0 f1, then f2 alone. What a does not act before is no one's.
        turns = (
            turn("a", 0),
            turn("f", 1, reward=1.0, trained=False),
            turn("f", 2, reward=2.0, trained=False),
        )
        assert round_rewards(episode(*turns, rewards={"f": 4.0}), "sum") == {0: 7.0}
