"""Comparison sets of a step: which turns are compared, and independence of the order of episodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.episodes import turn

from kapelle.algorithms.at_grpo import ATGRPO
from kapelle.algorithms.shared.groups import (
    CENTRED,
    LEAVE_ONE_OUT,
    SCALED,
    Comparison,
    Earlier,
    Member,
    by_agent,
    by_agent_turn,
    by_episode,
    by_prompt,
    by_round,
    by_state,
    by_turns_of_agent,
    compare,
)
from kapelle.algorithms.shared.rewards import step_rewards, turn_rewards
from kapelle.functional.advantages import group_centred, group_scaled, leave_one_out
from kapelle.rows import Signals, TurnKey
from kapelle.types import Episode, Group, Task

ESTIMATES = (group_scaled, group_centred, leave_one_out)


Sets = Callable[[Sequence[Group], Mapping[TurnKey, float]], list[Member]]
SETS: tuple[Sets, ...] = (
    by_agent,
    by_episode,
    by_round,
    by_agent_turn,
    by_state,
    by_prompt,
    by_turns_of_agent,
)


def rewards(groups: Sequence[Group]) -> Mapping[TurnKey, float]:
    return step_rewards(groups, turn_rewards, "individual")


FEW = settings(max_examples=25, deadline=None)
PRIZES = st.integers(-8, 8).map(lambda n: n / 4)


@st.composite
def episodes(draw: st.DrawFn, task: Task) -> Episode:
    """Up to six turns of two agents who learn and one who does not; some episodes fail."""
    speakers = draw(st.lists(st.sampled_from("abf"), min_size=0, max_size=6))
    turns = tuple(
        turn(name, k, 1, reward=draw(PRIZES), trained=name != "f") for k, name in enumerate(speakers)
    )
    names = tuple(dict.fromkeys(speakers)) or ("a",)
    error = draw(st.sampled_from([None, None, None, "EpisodeError: gone"]))
    rewards = {name: draw(PRIZES) for name in names}
    return Episode(task, 0, names, turns, rewards=rewards, error=error)


@st.composite
def steps(draw: st.DrawFn) -> list[Group]:
    """Up to three tasks of up to four episodes."""
    tasks = [Task(f"t{k}", str(k)) for k in range(draw(st.integers(1, 3)))]
    return [Group(task, tuple(draw(st.lists(episodes(task), min_size=1, max_size=4)))) for task in tasks]


def of_place(sets: Sets, groups: Sequence[Group]) -> dict[tuple[int | str, ...], list[Member]]:
    found: dict[tuple[int | str, ...], list[Member]] = {}
    for member in sets(groups, rewards(groups)):
        found.setdefault(member.place, []).append(member)
    return found


@FEW
@given(steps())
def test_every_trained_turn_is_in_exactly_one_set_and_no_set_mixes_tasks(groups: list[Group]) -> None:
    trained = {
        TurnKey(g, e, one.index)
        for g, group in enumerate(groups)
        for e, episode in enumerate(group.episodes)
        if episode.error is None
        for one in episode.turns
        if one.agent != "f"
    }
    for sets in SETS:
        found = of_place(sets, groups)
        for members in found.values():
            assert len({key.group for member in members for key in member.keys}) == 1, sets
        keys = [key for members in found.values() for member in members for key in member.keys]
        assert set(keys) == trained, sets
        assert len(keys) == len(trained), sets


def number(groups: Sequence[Group], key: TurnKey) -> int:
    """How many trained turns its agent had before it."""
    turns = groups[key.group].episodes[key.episode].turns
    return sum(one.agent == turns[key.turn].agent for one in turns[: key.turn])


def speaker(groups: Sequence[Group], key: TurnKey) -> str:
    return groups[key.group].episodes[key.episode].turns[key.turn].agent


ALIKE: list[tuple[Sets, Callable[[Sequence[Group], TurnKey], object]]] = [
    (by_agent, speaker),
    (by_turns_of_agent, speaker),
    (by_state, lambda groups, key: (speaker(groups, key), key.turn)),
    (by_agent_turn, lambda groups, key: (speaker(groups, key), number(groups, key))),
    (by_round, number),
    (by_prompt, number),
]


@FEW
@given(steps())
def test_a_set_compares_like_with_like(groups: list[Group]) -> None:
    for sets, alike in ALIKE:
        for members in of_place(sets, groups).values():
            assert len({alike(groups, key) for member in members for key in member.keys}) == 1, sets


@pytest.mark.slow
@FEW
@given(steps(), st.randoms(use_true_random=False), st.sampled_from(ESTIMATES))
def test_advantages_follow_their_episodes_into_any_order(
    groups: list[Group], generator: Random, estimate: Callable[..., torch.Tensor]
) -> None:
    orders = [list(range(len(group.episodes))) for group in groups]
    for order in orders:
        generator.shuffle(order)
    tasks = list(range(len(groups)))
    generator.shuffle(tasks)
    moved = [Group(groups[g].task, tuple(groups[g].episodes[e] for e in orders[g])) for g in tasks]
    for sets in SETS:
        before = compare(sets(groups, rewards(groups)), estimate)
        after = compare(sets(moved, rewards(moved)), estimate)
        assert len(before) == len(after)
        for key, value in after.items():
            g = tasks[key.group]
            assert value == pytest.approx(before[TurnKey(g, orders[g][key.episode], key.turn)], abs=1e-9), (
                sets
            )


@FEW
@given(steps())
def test_centred_advantages_of_a_set_sum_to_nothing(groups: list[Group]) -> None:
    for sets in (by_agent, by_episode, by_agent_turn, by_round):
        advantage = compare(sets(groups, rewards(groups)), group_centred)
        for members in of_place(sets, groups).values():
            if len(members) > 1:
                total = sum(advantage[member.keys[0]] for member in members)
                assert total == pytest.approx(0.0, abs=1e-9), sets


def test_candidates_of_a_tree_are_compared_with_those_of_their_own_prompt() -> None:
    # At turn 0 one of two candidates was right; at turn 1 both earned 1: nothing to learn there.
    turns = (turn("a", 0, 1, continuation_return=1.0), turn("b", 1, 1, continuation_return=1.0))
    branches = (
        turn("a", 2, 1, continuation_return=0.0, parent=0),
        turn("b", 3, 1, continuation_return=1.0, parent=1),
    )
    tree = Episode(Task("t", "?"), 0, ("a", "b"), turns, branches=branches)
    credit = ATGRPO(tree=True, group_size=2, scale="none").build().credit
    assert credit is not None
    given = credit([Group(tree.task, (tree,))], Signals())
    assert {key.turn: float(credit.advantage_T) for key, credit in given.items()} == {
        0: 0.5,
        2: -0.5,
        1: 0.0,
        3: 0.0,
    }


def alone(value: float, group: int = 0, like: str = "a") -> Member:
    return Member((group, like), value, 1, (TurnKey(group, 0, 0),), (like,))


class TestEarlierReturns:
    """One that is alone in its set is compared with a running mean, of which each return has a twentieth."""

    def test_mean_and_spread_by_hand(self) -> None:
        earlier = Earlier()
        earlier.take_in([alone(6.0), alone(10.0, 1)])  # the first ones: mean 8, variance 4
        found = earlier.of(("a",))
        assert found is not None
        assert tuple(found) == (8.0, 4.0)
        # 0.95·8 + 0.05·0 = 7.6; 0.95·4 + 0.05·0 + 0.05·0.95·8² = 6.84
        earlier.take_in([alone(0.0)])
        assert earlier.of(("a",)) == pytest.approx((7.6, 6.84))
        # Two at once have 1 − 0.95² = 0.0975: 0.9025·7.6 + 0.0975·2 = 7.054
        earlier.take_in([alone(0.0), alone(4.0, 1)])
        found = earlier.of(("a",))
        assert found is not None
        assert found.mean == pytest.approx(7.054)
        assert earlier.of(("b",)) is None

    @pytest.mark.parametrize(
        ("how", "by_hand"),
        [
            (CENTRED, -8.0),
            (LEAVE_ONE_OUT, -8.0),
            # Its own square counts: 0.05·0.95·64 = 3.04, and −8/√3.04 = −4.588.
            (SCALED, -4.5883147),
        ],
    )
    def test_it_is_compared_with_those_before_it(self, how: Comparison, by_hand: float) -> None:
        earlier = Earlier()
        assert compare([alone(8.0)], how, earlier) == {TurnKey(0, 0, 0): 0.0}
        assert compare([alone(0.0)], how, earlier) == pytest.approx({TurnKey(0, 0, 0): by_hand}, rel=1e-5)

    def test_the_first_ones_are_compared_with_other_tasks(self) -> None:
        members = [alone(8.0), alone(2.0, 1), alone(5.0, 2, "b")]
        assert list(compare(members, CENTRED).values()) == [6.0, -6.0, 0.0]

    def test_a_turn_is_compared_with_turns_of_its_agent_of_the_same_number(self) -> None:
        """a's first turn, which earns 8 and 5, follows b's in one task; its second earns 2 and has nothing to be compared with."""
        one = Episode(Task("t0", ""), 0, ("a", "b"), (turn("b", 0), turn("a", 1)), rewards={"a": 8.0})
        two = Episode(Task("t1", ""), 0, ("a",), (turn("a", 0, reward=3.0), turn("a", 1)), rewards={"a": 2.0})
        groups = [Group(each.task, (each,)) for each in (one, two)]
        found = compare(by_agent_turn(groups, rewards(groups)), LEAVE_ONE_OUT)
        assert [found[key] for key in sorted(found)] == [0.0, 3.0, -3.0, 0.0]

    def test_the_largest_set_of_the_step_scales_a_lone_member(self) -> None:
        """Two attempts at one task, one at another: the full set is R − mean, and one alone weighs ½ as its members do."""
        pair = [Member((0, "a"), value, 1, (TurnKey(0, k, 0),), ("a",)) for k, value in enumerate((1.0, 3.0))]
        earlier = Earlier()
        earlier.take_in([alone(2.0)])
        found = compare([*pair, alone(8.0, 1)], CENTRED, earlier)
        assert list(found.values()) == pytest.approx([-1.0, 1.0, 3.0])

    def test_a_smaller_set_weighs_as_much_as_a_full_one(self) -> None:
        """Two of three: 2/1 · 2/3 · (R − 2) = ±4/3."""
        full = [Member((0, "a"), float(k), 1, (TurnKey(0, k, 0),), ("a",)) for k in range(3)]
        two = [Member((1, "a"), value, 1, (TurnKey(1, k, 0),), ("a",)) for k, value in enumerate((1.0, 3.0))]
        found = list(compare([*full, *two], CENTRED).values())
        assert found == pytest.approx([-1.0, 0.0, 1.0, -4 / 3, 4 / 3])

    def test_a_checkpoint_holds_them(self) -> None:
        one, other = Earlier(), Earlier()
        one.take_in([alone(6.0), alone(10.0, 1), alone(3.0, 2, "b")])
        other.load_state(json.loads(json.dumps(one.state())))
        for how in (CENTRED, SCALED):
            assert compare([alone(1.0)], how, one) == compare([alone(1.0)], how, other)
        assert other.of(("b",)) is not None
