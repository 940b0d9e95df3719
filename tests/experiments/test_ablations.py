"""Ablations omit the piece that they are named after, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from experiments.ablations import OneBaseline, Together, TreeAgainstAll, Unfinished
from experiments.lab import Arm, TableRun, noise, recipe_of, relay_start
from tests.support.episodes import episode, group, turn
from tests.support.tiny import team_of

from kapelle.rows import Signals


def test_all_agents_are_normalised_together() -> None:
    # Returns 4, 2 of one agent and 0, 0 of the other: mean 1.5, squared differences 6.25 + 0.25 + 2.25 + 2.25 = 11.
    paid = [{"a": 4.0, "b": 0.0}, {"a": 2.0, "b": 0.0}]
    groups = [group(*(episode(turn("a", 0, 2), turn("b", 1, 2), rewards=rewards) for rewards in paid))]
    std = math.sqrt(11 / 3)

    def advantages(algorithm: Together) -> list[float]:
        credit = algorithm.credit(groups, Signals())
        return [float(credit[key].advantage_T[0]) for key in sorted(credit)]

    together = Together(team_reward="individual")
    assert advantages(together) == pytest.approx([2.5 / std, -1.5 / std, 0.5 / std, -1.5 / std], rel=1e-5)
    spread = Together(team_reward="individual", one="spread")
    assert advantages(spread) == pytest.approx([1 / std, 0.0, -1 / std, 0.0], rel=1e-5)


def test_one_mean_for_all_roles() -> None:
    algorithm = OneBaseline(decay=0.5).build()
    assert algorithm.memory is not None
    memory = algorithm.memory(team_of("a", "b"), 0)
    credit = memory(
        [group(episode(turn("a", 0, 2), turn("b", 1, 2), rewards={"a": 8.0, "b": 0.0}))], Signals()
    )
    # 0 → 4 by the first's 8 → 2 by the second's 0.
    assert [float(credit[key].advantage_T[0]) for key in sorted(credit)] == pytest.approx([4.0, -2.0])


def test_a_tree_may_be_compared_with_the_rest_of_its_group() -> None:
    recipe = recipe_of(
        {"name": "relay", "seats": 2}, Arm({"name": "c3", "widths": [2, 2], "team_reward": "sum"}), 1.0, 0
    )
    run = TableRun(recipe, relay_start([0.5, 0.5]))
    algorithm = TreeAgainstAll(widths=(2, 2), team_reward="sum")
    for _ in range(6):
        groups, _ = run.step()
        paid = [sum(turn.reward for turn in each.turns) for each in groups[0].episodes]
        # A first turn stands for two attempts and is compared with the two others; a second one for itself, with the three others.
        first = [(paid[0] + paid[1] - paid[2] - paid[3]) / 2 * way for way in (1, -1)]
        second = [one - (sum(paid) - one) / 3 for one in paid]
        credit = algorithm.credit(groups, Signals())
        found = {
            (key.episode, key.turn): float(each.advantage_T[0]) for key, each in credit.items() if each.weight
        }
        expected = {(0, 0): first[0], (2, 0): first[1]} | {(e, 1): second[e] for e in range(4)}
        assert found == pytest.approx(expected)


def test_noise_is_measured_in_tokens() -> None:
    # Two attempts at one of two letters, compared with each other: half of the pairs differ, and their update is twice the gradient.
    rloo = Arm({"name": "rloo", "group_size": 2, "team_reward": "sum"})
    run = TableRun(recipe_of({"name": "sum_game", "seats": 1, "letters": 2}, rloo, 1.0, 0))
    assert noise(run, 120) == pytest.approx(2.0, rel=0.25)


def test_what_was_left_unfinished_may_be_dropped() -> None:
    def attempts(paid: float, runs: tuple[tuple[int, int], ...]) -> object:
        spoken = replace(turn("a", 0, 2, version=runs[-1][0]), versions=runs if len(runs) > 1 else ())
        return group(
            episode(spoken, rewards={"a": paid}), episode(turn("a", 0, 2, version=3), rewards={"a": 0.0})
        )

    groups = [attempts(1.0, ((3, 2),)), attempts(1.0, ((2, 1), (3, 1))), attempts(1.0, ((2, 2),))]
    credit = Unfinished(scale="none").credit(groups, Signals())  # type: ignore[arg-type]
    assert [credit[key].weight for key in sorted(credit)] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
