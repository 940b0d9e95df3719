from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest

from kapelle.features.league.assignment import (
    Assignments,
    Follower,
    OpponentEntry,
    chances,
    met_in,
    sampled_for_slots,
)
from kapelle.features.league.pool import EXPLOITER, MAIN, LeagueMember, MemberPool
from kapelle.features.league.settings import LeagueConfig

AGENTS = ("a", "b", "c")


def pool_with(points: dict[str, tuple[int, int]], **settings: object) -> tuple[LeagueConfig, MemberPool]:
    config = LeagueConfig.model_validate(settings)
    found = MemberPool(config, [LeagueMember(name, kind="player", player=name) for name in points])
    for name, (wins, losses) in points.items():
        for won in [1.0] * wins + [-1.0] * losses:
            found.played(MAIN, name, [won])
    return config, found


def test_pfsp_draws_those_whom_the_learner_does_not_beat() -> None:
    config, pool = pool_with({"easy": (3, 0), "hard": (0, 3)}, population={"name": "pfsp", "power": 2.0})
    # Points are (3 + 1/2)/4 = 7/8 and 1/8: weights (1/8)² and (7/8)².
    found = chances(config, pool, MAIN)
    assert found["hard"] / found["easy"] == pytest.approx(49.0)
    assert sum(found.values()) == pytest.approx(1.0)


def test_pfsp_of_even_matches_draws_neither_the_beaten_nor_the_invincible() -> None:
    config, pool = pool_with(
        {"easy": (3, 0), "even": (0, 0), "hard": (0, 3)}, population={"name": "pfsp", "weight": "even"}
    )
    found = chances(config, pool, MAIN)
    assert found["easy"] == pytest.approx(found["hard"])
    assert found["even"] / found["easy"] == pytest.approx((1 / 4) / (7 / 64))


def test_fictitious_play_draws_all_alike_whatever_happened() -> None:
    config, pool = pool_with({"easy": (9, 0), "hard": (0, 9)}, population="fictitious")
    assert set(chances(config, pool, MAIN).values()) == {0.5}


def test_few_slots_are_shared_without_bias() -> None:
    """Over many steps each member is sampled, times its chance then, as often as it should be drawn."""
    wanted = {"a": 0.4, "b": 0.05, "c": 0.15, "d": 0.2, "fixed": 0.2}
    met: dict[str, list[float]] = {name: [] for name in wanted}
    for seed in range(4000):
        found = sampled_for_slots(wanted, ["a", "b", "c", "d"], 2, seed)
        assert sum(found.values()) == pytest.approx(1.0)
        assert len(found.keys() - {"fixed"}) <= 2
        for name, own in met.items():
            own.append(found.get(name, 0.0))
    for name, chance in wanted.items():
        assert fmean(met[name]) == pytest.approx(chance, abs=0.02)


def assignments(share: float = 0.75, exploited: float = 0.0) -> Assignments:
    seats = (
        OpponentEntry("old", dict.fromkeys(AGENTS, 0.5), {agent: f"league:0:{agent}" for agent in AGENTS}),
        OpponentEntry("solver", dict.fromkeys(AGENTS, 0.5), {}, "nash"),
    )
    exploiters = {agent: f"exploiter:{agent}" for agent in AGENTS} if exploited else {}
    return Assignments(AGENTS, seats, share, AGENTS, exploiters, exploited)


def test_shares_chances_and_homes_hold_within_a_step() -> None:
    casts = assignments().casts(seed=1, step=7, count=48)
    met = Counter(met_in(cast, AGENTS, AGENTS) for cast in casts)
    assert met.pop(None) == 12
    assert Counter(each.opponent for each in filter(None, met.elements())) == {"old": 18, "nash": 18}
    homes = Counter(each.home for each in filter(None, met.elements()))
    assert all(homes[agent] >= 6 for agent in AGENTS)


def test_everybody_but_the_one_at_home_is_played_by_the_member() -> None:
    for cast in assignments(share=1.0).casts(0, 1, 12):
        met = met_in(cast, AGENTS, AGENTS)
        learner, home, member = (met.learner, met.home, met.opponent) if met else ("", "", "")
        assert learner == MAIN
        assert cast.keys() == set(AGENTS) - {home}
        for agent, each in cast.items():
            assert (each.policy, each.player) == (
                (f"league:0:{agent}", "old") if member == "old" else ("", "nash")
            )


def test_the_exploiter_sits_alone_among_the_learners() -> None:
    casts = assignments(exploited=0.25).casts(3, 2, 16)
    own = [cast for cast in casts if (met := met_in(cast, AGENTS, AGENTS)) and met.learner == EXPLOITER]
    assert len(own) == 4
    # The learners play against the pool in their share, ¾, of the other 12.
    assert sum(bool(met_in(cast, AGENTS, AGENTS)) for cast in casts) - len(own) == 9
    assert all(
        len(cast) == 1 and next(iter(cast.values())).policy == f"exploiter:{agent}"
        for cast in own
        for agent in cast
    )


def test_partners_learn_equally_where_a_step_has_fewer_tasks_than_partners() -> None:
    partners = tuple({agent: f"partner:{k}:{agent}" for agent in AGENTS} for k in range(5))
    assigned = Assignments(AGENTS, (), 1.0, AGENTS, {}, partners=partners, partners_until=10)
    cast = [each for step in range(1, 11) for each in assigned.casts(3, step, 2)]
    assert Counter(each["a"].player for each in cast) == {f"partner_{k}": 4 for k in range(5)}
    assert all({own.player for own in each.values()} == {each["a"].player} for each in cast)


def test_learners_in_line_have_equal_shares_and_meet_whom_each_has_before_it() -> None:
    old, draft = (
        OpponentEntry(
            name, dict.fromkeys(AGENTS, chance), {agent: f"league:{slot}:{agent}" for agent in AGENTS}
        )
        for slot, (name, chance) in enumerate({"self@0": 1.0, "draft-self@3": 0.5}.items())
    )
    half = replace(old, chances=draft.chances)
    followers = tuple(
        Follower(f"follower_{k}", {agent: f"follower:{k}:{agent}" for agent in AGENTS}, seats)
        for k, seats in enumerate([(draft, half), (old,)])
    )
    line = Assignments(AGENTS, (old,), 0.75, AGENTS, {}, followers=followers)
    casts = line.casts(3, 2, 48)
    met = [each for each in (met_in(cast, AGENTS, AGENTS) for cast in casts) if each]
    assert Counter((each.learner, each.opponent) for each in met) == {
        ("self", "self@0"): 12,
        ("follower_0", "self@0"): 6,
        ("follower_0", "draft-self@3"): 6,
        ("follower_1", "self@0"): 12,
    }
    for cast in casts:
        own = [each for each in cast.values() if each.policy.startswith("follower:")]
        # In the other quarter of its tasks each plays itself, at every seat.
        assert not own or (len(cast), len(own)) in {(3, 1), (3, 3)}


def test_a_team_with_one_learner_meets_members_by_each_learner_of_a_line() -> None:
    """The seats of the others are played by the member too, and what no one learns stays as the team map says."""
    seat = OpponentEntry("self@0", {"a": 1.0}, {"a": "league:0:a", "b": "b", "c": "c"})
    line = Assignments(
        ("a",), (seat,), 1.0, AGENTS, {}, followers=(Follower("follower_0", {"a": "follower:0:a"}, (seat,)),)
    )
    found = Counter(
        met and (met.learner, met.home, met.opponent)
        for met in (met_in(cast, AGENTS, ("a",)) for cast in line.casts(1, 1, 8))
    )
    assert found == {("self", "a", "self@0"): 4, ("follower_0", "a", "self@0"): 4}
