from __future__ import annotations

import json
import random

import pytest

from kapelle.features.league.pool import MAIN, LeagueMember, MatchScore, MemberPool, dependence
from kapelle.features.league.settings import LeagueConfig


def pool(**settings: object) -> MemberPool:
    return MemberPool(
        LeagueConfig.model_validate(settings), [LeagueMember("rock", kind="player", player="scripted")]
    )


def entered(at: int, **settings: object) -> MemberPool:
    found = pool(**settings)
    for step in range(at):
        found.enter(MAIN, 10 * step)
    return found


def test_points_count_draws_as_half_and_begin_at_one_half() -> None:
    found = pool()
    for won in (1.0, 1.0, 0.0, -1.0):
        found.played(MAIN, "rock", [won])
    # Two wins, half a draw and half a game more, of four games and one more.
    assert found.scores[MAIN, "rock"].points == pytest.approx(0.6)


def test_old_games_fade_for_draws_and_stay_for_ratings() -> None:
    found = pool(forget=0.5)
    found.played(MAIN, "rock", [1.0])
    found.fade()
    found.fade()
    found.played(MAIN, "rock", [-1.0])
    assert found.scores[MAIN, "rock"].wins == 0.25
    assert found.met[f"{MAIN}@now", "rock"].wins == 1.0


def test_games_of_a_time_belong_to_who_enters_at_its_end() -> None:
    found = pool()
    found.played(MAIN, "rock", [1.0])
    found.enter(MAIN, 10)
    found.played(MAIN, "rock", [-1.0])
    assert found.met[f"{MAIN}@10", "rock"].wins == 1.0
    assert found.met[f"{MAIN}@now", "rock"].losses == 1.0


@pytest.mark.parametrize(
    ("leaves", "left"), [("oldest", [20, 30, 40]), ("thinned", [0, 30, 40]), ("weakest", [0, 20, 40])]
)
def test_who_leaves_when_there_are_too_many(leaves: str, left: list[int]) -> None:
    found = pool(keep=3, leaves=leaves)
    for step in (0, 10, 20, 30, 40):
        for member in found.past:  # the later one entered, the harder it is beaten; 30 is beaten always
            won = 1.0 if member.step in {10, 30} else -1.0
            found.played(MAIN, member.name, [won])
        found.enter(MAIN, step)
    assert [member.step for member in found.past] == left
    assert set(found.gone) == {f"{MAIN}@{step}" for step in (0, 10, 20, 30) if step not in left}
    assert all(one not in found.gone and other not in found.gone for one, other in found.met)


def test_who_stays_is_spread_over_the_run() -> None:
    """Step 10 has neighbours 20 steps apart, step 20 has neighbours 40 apart."""
    found = pool(keep=4, leaves="thinned")
    for step in (0, 10, 20, 50, 60):
        found.enter(MAIN, step)
    assert [member.step for member in found.past] == [0, 20, 50, 60]


def test_the_weakest_is_the_learners_own_where_an_exploiter_enters() -> None:
    """An exploiter meets the learner alone, so that its games say nothing of members."""
    found = pool(keep=2, leaves="weakest", exploiter={})
    found.enter(MAIN, 0)
    found.enter(MAIN, 10)
    for member, won in zip(found.past, (-1.0, 1.0), strict=True):
        found.played(MAIN, member.name, [won] * 8)
    found.played("exploiter", MAIN, [1.0])
    found.enter("exploiter", 20)
    assert [member.name for member in found.past] == [f"{MAIN}@0", "exploiter@20"]


def scores(tasks: int, size: int, luck: float, seed: int = 0) -> MatchScore:
    """Return an even pair's score over tasks, in which a share `luck` of the deals decides all games of a task."""
    draw, found = random.Random(seed), MatchScore()
    for _ in range(tasks):
        decided, side = draw.random() < luck, draw.choice((-1.0, 1.0))
        found += MatchScore.of_group([side if decided else draw.choice((-1.0, 1.0)) for _ in range(size)])
    return found


@pytest.mark.parametrize(
    ("luck", "like_one"), [(0.0, 1.0), (0.25, 1 + 7 * 0.25), (0.5, 1 + 7 * 0.5), (1.0, 8.0)]
)
def test_games_say_as_much_as_their_spread_between_tasks(luck: float, like_one: float) -> None:
    """Of games of which a share has one result for all n of a task, 1 + (n − 1)·share say as much as one (Kish 1965)."""
    found = [scores(500, 8, luck, seed) for seed in range(8)]
    assert dependence(found) == pytest.approx(like_one, rel=0.06)
    assert dependence([scores(500, 1, luck)]) == 1.0, "tasks of one game"
    assert dependence([]) == 1.0


def test_few_tasks_by_hand() -> None:
    """Of four games of each of three tasks 4, 2 and 1 are won; another pair's single task tells nothing."""
    found = sum((MatchScore.of_group([1.0] * wins + [-1.0] * (4 - wins)) for wins in (4, 2, 1)), MatchScore())
    # Shares 1, ½ and ¼ have the mean 7/12 and the variance (21/16 − 49/48)/2 = 7/48; of four independent games it is 35/144/4.
    # t = 4.303 with two degrees of freedom, 1.960 of the normal distribution.
    expected = (7 / 48) / (35 / 144 / 4) * (4.302653 / 1.959964) ** 2
    assert dependence([found, MatchScore.of_group([1.0] * 4)]) == pytest.approx(expected)
    # Of two tasks, 3 and 1 of four games: 2/16 / (1/4 / 4) = 2, and t = 12.706 with one degree of freedom.
    two = MatchScore.of_group([1.0, 1.0, 1.0, -1.0]) + MatchScore.of_group([1.0, -1.0, -1.0, -1.0])
    assert dependence([two]) == pytest.approx(2.0 * (12.706205 / 1.959964) ** 2)


def test_draws_alone_are_as_many_games_as_tasks() -> None:
    drawn = sum((MatchScore.of_group([0.0] * 4) for _ in range(200)), MatchScore())
    assert dependence([drawn]) == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    ("wins", "losses", "enters"), [(9, 1, True), (7, 3, False), (70, 30, True), (4, 0, True), (2, 0, False)]
)
def test_a_learner_enters_when_it_surely_beats_the_pool(wins: int, losses: int, enters: bool) -> None:
    """More than 0.55 by the lower end of Wilson's one-sided 95 % interval: 9:1 0.65, 7:3 0.44, 70:30 0.62, 4:0 0.60, 2:0 0.43."""
    found = pool(enter={"every": 5, "beats": 0.55})
    for won in [1.0] * wins + [-1.0] * losses:
        found.played(MAIN, "rock", [won])
    assert not found.may_enter(MAIN, 4)
    assert found.may_enter(MAIN, 5) is enters


def test_games_of_one_deal_are_no_proof_of_their_number() -> None:
    """Three deals that were won in all eight games are three wins, which prove little; 24 deals of one game each prove much."""
    one_deal, many = (pool(enter={"every": 5, "beats": 0.55}) for _ in range(2))
    for _ in range(3):
        one_deal.played(MAIN, "rock", [1.0] * 8)
    for _ in range(24):
        many.played(MAIN, "rock", [1.0])
    assert not one_deal.may_enter(MAIN, 5)
    assert many.may_enter(MAIN, 5)


def test_the_state_survives_json() -> None:
    found = entered(4, keep=2)
    found.played(MAIN, f"{MAIN}@30", [0.0])
    found.payoffs["first", f"{MAIN}@30", "rock"] = 0.25
    found.payoff_games["first", f"{MAIN}@30", "rock"] = 12
    again = pool(keep=2)
    again.load_state(json.loads(json.dumps(found.state())))
    assert again.state() == found.state()
    assert again.members == found.members
    assert again.enter(MAIN, 50)[0].serial == 5


def test_counts_of_games_are_removed_with_their_members() -> None:
    found = entered(2, keep=2)
    for name in found.names:
        found.payoffs["first", name, name] = 0.5
        found.payoff_games["first", name, name] = 12
    _, out = found.enter(MAIN, 90)
    assert out is not None
    assert out.name not in {key[1] for key in found.payoff_games}
    assert found.payoff_games.keys() == found.payoffs.keys()


def test_results_of_whoever_is_no_member_count_for_who_met_it() -> None:
    """The exploiter's only opponent is the learner as it is now, and it enters by what it wins of it."""
    found = pool(enter={"every": 1, "beats": 0.5, "confidence": 0.9})
    assert not found.may_enter("exploiter", 1)
    for _ in range(8):
        found.played("exploiter", MAIN, [1.0])
    assert found.may_enter("exploiter", 1)


def test_drafts_are_before_whom_they_are_for_and_leave_no_results() -> None:
    found = pool()
    first = found.redraft([MAIN, "follower_0"], 3)
    assert [member.name for member in found.before(0)] == ["rock"]
    assert [member.name for member in found.before(2)] == ["rock", "draft-self@3", "draft-follower_0@3"]
    found.played("follower_0", "draft-self@3", [1.0])
    assert not found.scores
    assert not found.met
    found.payoffs["a", "rock", "draft-self@3"] = 1.0
    second = found.redraft([MAIN, "follower_0"], 6)
    assert not found.payoffs
    assert found.gone == {"draft-self@3": (3, 6), "draft-follower_0@3": (3, 6)}
    assert len({each.serial for each in (*first, *second)}) == 4, "a version names one set of weights"
    again = pool()
    again.load_state(json.loads(json.dumps(found.state())))
    assert again.drafts == found.drafts
