"""Ratings recover strengths, their intervals cover the truth, and meta-strategies match games solved by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from numpy.typing import ArrayLike

pytest.importorskip("scipy")

from kapelle.errors import ConfigError
from kapelle.functional import ratings as module
from kapelle.functional.ratings import (
    ELO,
    Results,
    alpha_rank,
    cycle,
    effective_diversity,
    effective_number,
    linked,
    log_odds,
    meta_strategy,
    nash_averaging,
    ratings,
)

RPS = np.array([[0.0, -1.0, 1.0], [1.0, 0.0, -1.0], [-1.0, 1.0, 0.0]])


def test_ratings_are_the_odds_that_games_were_won_at() -> None:
    """Ten to one is 400 points; who never met someone is rated through others."""
    rated = ratings([0, 1, 2], {(0, 1): (10_000, 0, 1_000), (1, 2): (10_000, 0, 1_000)})
    assert rated[0][0] - rated[1][0] == pytest.approx(400, abs=2)
    assert rated[0][0] - rated[2][0] == pytest.approx(800, abs=4)
    assert sum(each[0] for each in rated.values()) == pytest.approx(0, abs=1e-6)
    assert all(low < middle < high and high - low < 80 for middle, low, high in rated.values())
    few = ratings([0, 1, 2], {(0, 1): (10, 0, 1), (1, 2): (10, 0, 1)})
    assert few[0][2] - few[0][1] > 200, "from few games little is known"


def test_a_draw_is_half_a_win_and_a_player_with_only_wins_has_a_rating() -> None:
    even = ratings([0, 1], {(0, 1): (0, 500, 0)})
    assert even[0][0] == pytest.approx(0, abs=0.1)
    only = ratings([0, 1], {(0, 1): (500, 0, 0)})
    assert 800 < only[0][0] - only[1][0] < 3000


def test_a_rating_above_a_player_has_the_interval_of_the_difference() -> None:
    """Of two, the difference is twice what either is above their mean; the player itself is surely at 0."""
    results = {(3, 5): (30, 0, 20)}
    mean, above = ratings([3, 5], results), ratings([3, 5], results, zero=5)
    assert above[5] == (0.0, 0.0, 0.0)
    assert above[3] == pytest.approx([2 * value for value in mean[3]], abs=1e-3)
    three = {(0, 1): (30, 0, 20), (1, 2): (3, 0, 2), (0, 2): (5, 0, 5)}
    middle, low, high = ratings([0, 1, 2], three, zero=1)[0]
    assert middle == pytest.approx(
        ratings([0, 1, 2], three)[0][0] - ratings([0, 1, 2], three)[1][0], abs=1e-6
    )
    wide = ratings([0, 1, 2], three, zero=2)[0]
    assert wide[2] - wide[1] > 1.5 * (high - low), "above one that played little, less is known"


def test_unlinked_players_are_not_compared() -> None:
    results = {(0, 1): (1, 0, 0), (2, 3): (1, 0, 0), (3, 4): (0, 1, 0)}
    assert linked(6, results) == [[2, 3, 4], [0, 1]]


def league(strengths: list[float], games: int, drawn: float, seed: int) -> Results:
    """Return a round of games that Bradley and Terry's model draws; equals draw in `drawn` of their games, others less often."""
    generator, results = random.Random(seed), {}
    for one in range(len(strengths)):
        for other in range(one + 1, len(strengths)):
            chance = 1 / (1 + math.exp(strengths[other] - strengths[one]))
            even = min(drawn * 4 * chance * (1 - chance), 2 * chance, 2 - 2 * chance)
            counts = [0, 0, 0]
            for _ in range(games):
                luck = generator.random()
                counts[0 if luck < chance - even / 2 else 1 if luck < chance + even / 2 else 2] += 1
            results[one, other] = (counts[0], counts[1], counts[2])
    return results


def covered(players: int, games: int, drawn: float, spread: float) -> float:
    """Return the share of true ratings in their intervals, over 200 leagues."""
    inside = []
    for seed in range(200):
        generator = random.Random(seed)
        strengths = [generator.gauss(0, spread) for _ in range(players)]
        mean = sum(strengths) / players
        rated = ratings(range(players), league(strengths, games, drawn, seed))
        inside += [
            low <= ELO * (strength - mean) <= high
            for strength, (_, low, high) in zip(strengths, rated.values(), strict=True)
        ]
    return sum(inside) / len(inside)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("drawn", [0.0, 0.3])
@pytest.mark.parametrize(("players", "games"), [(3, 10), (5, 5), (5, 30), (4, 300)])
@pytest.mark.parametrize("spread", [0.5, 1.5])
def test_intervals_cover_the_truth_in_95_of_100(
    players: int, games: int, drawn: float, spread: float
) -> None:
    assert covered(players, games, drawn, spread) == pytest.approx(0.95, abs=0.03)


def test_draws_narrow_an_interval_as_points_vary_less() -> None:
    """Of 100 even games with 80 draws the points vary a fifth as much as without draws."""
    decided, drawn = (ratings([0, 1], {(0, 1): counts})[0] for counts in ((50, 0, 50), (10, 80, 10)))
    assert (drawn[2] - drawn[1]) / (decided[2] - decided[1]) == pytest.approx(math.sqrt(0.2), rel=0.02)


def test_games_of_one_deal_are_one_observation() -> None:
    """The same games, ten times over on each of 40 deals, say no more than 40 deals do."""
    deals: list[Results] = [{(0, 1): (10, 0, 0) if k % 2 else (0, 0, 10)} for k in range(40)]
    low, high = ratings([0, 1], {(0, 1): (200, 0, 200)}, deals)[0][1:]
    once = ratings([0, 1], {(0, 1): (20, 0, 20)})[0]
    assert high - low == pytest.approx(once[2] - once[1], rel=0.1)
    assert ratings([0, 1], {(0, 1): (200, 0, 200)})[0][2] < high / 2, "as if games were independent"


def test_few_deals_by_hand() -> None:
    """Of 1000 games on each of four deals one player wins 520, 480, 510 and 490."""
    deals: list[Results] = [{(0, 1): (wins, 0, 1000 - wins)} for wins in (520, 480, 510, 490)]
    middle, low, high = ratings([0, 1], {(0, 1): (2000, 0, 2000)}, deals, zero=1)[0]
    # The variance of their sum is 4/3 · (20² + 20² + 10² + 10²), the information 4000/4, and t = 3.182 with three degrees of freedom.
    assert middle == pytest.approx(0.0, abs=1e-6)
    assert (-low, high) == pytest.approx([3.182446 * math.sqrt(4 / 3 * 1000) / 1000 * ELO] * 2, rel=0.01)


def test_every_rating_recovers_a_known_order() -> None:
    strengths = [1.5, 0.5, 0.0, -0.5, -2.0]
    results = league(strengths, 200, 0.2, seed=1)
    rated = ratings(range(5), results)
    assert sorted(rated, key=lambda each: -rated[each][0]) == [0, 1, 2, 3, 4]
    assert all(low < middle < high for middle, low, high in rated.values())
    table = log_odds(5, results)
    assert nash_averaging(table)[0] == pytest.approx([1, 0, 0, 0, 0])
    assert int(alpha_rank(table).argmax()) == 0


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kapelle\[games\]"):
        nash_averaging(RPS)


class TestAlphaRank:
    @pytest.mark.parametrize("shapes", [[(5, 5)], [(3, 4)] * 2, [(2, 3, 4)] * 3, [(1, 3)] * 2, [(1, 1)]])
    def test_it_is_openspiels(self, shapes: list[tuple[int, ...]]) -> None:
        pytest.importorskip("matplotlib", reason="OpenSpiel's α-Rank imports it")
        from open_spiel.python.egt import alpharank

        generator = np.random.default_rng(0)
        tables = [generator.integers(-2, 3, shape).astype(float) for shape in shapes]  # with ties
        theirs = alpharank.compute(tables, use_inf_alpha=True)[2]
        assert np.abs(alpha_rank(*tables) - theirs).max() < 1e-9
        if len(tables) > 1:
            joint = theirs.reshape(shapes[0])
            for axis, share in enumerate(meta_strategy(tables, "alpha_rank")):
                assert share == pytest.approx(np.moveaxis(joint, axis, 0).reshape(len(share), -1).sum(1))

    def test_by_hand(self) -> None:
        assert alpha_rank(RPS) == pytest.approx([1 / 3] * 3, abs=1e-9)
        assert alpha_rank([[0.0, -1.0], [1.0, 0.0]])[1] == pytest.approx(0.99, abs=1e-9)


class TestNash:
    @pytest.mark.parametrize(
        ("table", "share"),
        [
            (RPS, [1 / 3, 1 / 3, 1 / 3]),
            ([[0, -1, -1], [1, 0, -1], [1, 1, 0]], [0, 0, 1]),
            ([[0, -1, 2], [1, 0, -1], [-2, 1, 0]], [1 / 4, 1 / 2, 1 / 4]),
            ([[0, 0, -1, 1], [0, 0, -1, 1], [1, 1, 0, -1], [-1, -1, 1, 0]], [1 / 6, 1 / 6, 1 / 3, 1 / 3]),
            (
                [[0, 234, 34, -270], [-234, 0, -38, -464], [-34, 38, 0, -270], [270, 464, 270, 0]],
                [0, 0, 0, 1],
            ),
            (np.zeros((3, 3)), [1 / 3] * 3),
        ],
        ids=["rps", "transitive", "biased", "copies", "dominated", "nothing"],
    )
    def test_averages_by_hand(self, table: list[list[float]], share: list[float]) -> None:
        """Three of OpenSpiel's examples, rock-paper-scissors with biased wins, and with two rocks, which share (1806.02643)."""
        found, skills = nash_averaging(table)
        assert found == pytest.approx(share, abs=1e-9)
        assert skills == pytest.approx(np.asarray(table, float) @ share, abs=1e-9)

    def test_two_by_two_by_hand(self) -> None:
        """Matching pennies in which heads pays double: p = (2/5, 3/5)."""
        first = np.array([[2.0, -1.0], [-1.0, 1.0]])
        for one, other in zip(meta_strategy([first, -first], "nash"), ([2 / 5, 3 / 5],) * 2, strict=True):
            assert one == pytest.approx(other, abs=1e-9)

    def test_unused_members_constrain_the_equilibrium(self) -> None:
        """Nothing is at stake in the first column; the second, which is not played, asks p₁ ≥ p₂ + p₃."""
        first = np.array([[0.0, 1.0], [0.0, -1.0], [0.0, -1.0]])
        found, _ = meta_strategy([first, -first], "nash")
        assert found == pytest.approx([1 / 2, 1 / 4, 1 / 4], abs=1e-7)

    @pytest.mark.parametrize(
        ("table", "first", "second"),
        [
            ([[[3, 0], [5, 1]], [[3, 5], [0, 1]]], [0, 1], [0, 1]),
            ([[[2, 0], [0, 1]], [[2, 0], [0, 1]]], [1, 0], [1, 0]),
            ([[[1, -1], [-1, 1]], [[-1, 1], [1.5, -1]]], [5 / 9, 4 / 9], [1 / 2, 1 / 2]),
        ],
        ids=["prisoners", "common", "mixed"],
    )
    def test_general_sums_by_hand(
        self, table: list[list[list[float]]], first: list[float], second: list[float]
    ) -> None:
        found = meta_strategy(table, "nash")
        assert found[0] == pytest.approx(first, abs=1e-9)
        assert found[1] == pytest.approx(second, abs=1e-9)

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("seed", range(20))
    def test_no_player_gains_by_deviating(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        shape = (int(generator.integers(2, 9)), int(generator.integers(2, 9)))
        first = generator.integers(-2, 3, shape).astype(float) if seed % 2 else generator.normal(size=shape)
        other = -first if seed % 4 < 3 else generator.normal(size=shape)
        p, q = meta_strategy([first, other], "nash")
        assert (first @ q).max() - p @ first @ q < 1e-8
        assert (p @ other).max() - p @ other @ q < 1e-8

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("seed", range(8))
    def test_members_that_play_nearly_alike_hide_no_equilibrium(self, seed: int) -> None:
        """Rock, paper and scissors nearly pure, and beginners who draw nearly evenly, in payoffs of five digits: who is played is a matter of rounding."""
        generator = np.random.default_rng(seed)
        pure = [[0.94, 0.04, 0.02], [0.03, 0.95, 0.02], [0.01, 0.03, 0.96]]
        members = np.vstack([pure, 1 / 3 + generator.normal(0, 0.03, (1 + seed % 4, 3))])
        members /= members.sum(1, keepdims=True)
        table = members @ np.array([[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]]) @ members.T
        table = np.round((table - table.T) / 2, 5)
        for share in meta_strategy([table, table.T], "nash"):
            assert (table @ share).max() < 1e-7

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("seed", range(10))
    def test_no_equilibrium_is_more_even(self, seed: int) -> None:
        """Every convex step towards another equilibrium strategy, found by a random linear goal, lowers the entropy."""
        from scipy.optimize import linprog

        generator = np.random.default_rng(seed)
        first = np.repeat(generator.integers(-1, 2, (4, 3)).astype(float), 2, axis=0)
        p, q = meta_strategy([first, -first], "nash")
        value = float(p @ first @ q)
        for _ in range(20):
            goal = generator.normal(size=len(p))
            other = linprog(
                goal, A_ub=-first.T, b_ub=[-value + 1e-9] * 3, A_eq=[[1.0] * len(p)], b_eq=[1.0]
            ).x
            assert effective_number(0.999 * p + 0.001 * other) <= effective_number(p) + 1e-7


class TestMetaStrategies:
    @pytest.mark.slow
    def test_uniform_and_replicators(self) -> None:
        """OpenSpiel's own example of a trivial game, in which the first rows and columns are best."""
        table = [[[2, 1, 0], [0, -1, -2]], [[2, 1, 0], [0, -1, -2]]]
        assert [list(each) for each in meta_strategy(table, "uniform")] == [[1 / 2] * 2, [1 / 3] * 3]
        rows, columns = meta_strategy(table, "prd")
        assert rows[0] > 0.9
        assert columns[0] > 0.9


def test_diversity_and_effective_numbers_by_hand() -> None:
    assert effective_diversity(RPS) == pytest.approx(1 / 3, abs=1e-9)
    assert effective_diversity([[0, -1, -1], [1, 0, -1], [1, 1, 0]]) == pytest.approx(0, abs=1e-9)
    assert effective_number([0.5, 0.5, 0.0]) == pytest.approx(2)
    assert effective_number([1.0]) == 1.0


def test_log_odds_by_hand() -> None:
    table = log_odds(3, {(0, 1): (9, 1, 0), (1, 2): (0, 4, 0)})
    assert table[0, 1] == pytest.approx(math.log(10 / 1))
    assert table[1, 0] == -table[0, 1]
    assert table[1, 2] == table[0, 2] == 0.0


def test_cycles_are_found_and_the_shortest_named() -> None:
    assert cycle([(0, 1), (1, 2), (0, 2)]) == []
    assert cycle([(3, 4), (4, 5), (5, 6), (6, 3), (0, 1), (1, 2), (2, 0)]) == [0, 1, 2]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ([[0.0, math.nan], [math.nan, 0.0]], "finite numbers"),
        ([[0.0, math.inf], [-math.inf, 0.0]], "finite numbers"),
        ([[0.0, 1.0, 2.0], [-1.0, 0.0, 1.0]], r"\(2, 3\)"),
        (np.zeros((0, 0)), r"\(0, 0\)"),
        ([[0.0, 1.0], [1.0, 0.0]], "antisymmetric"),
    ],
)
def test_invalid_tables_raise_an_error(table: ArrayLike, said: str) -> None:
    for of in (nash_averaging, effective_diversity):
        with pytest.raises(ConfigError, match=said):
            of(table)
