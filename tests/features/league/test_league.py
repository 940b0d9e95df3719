"""The league in a run: who sits in the slots, who learns, and that a broken run continues bitwise."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.resumed import resumed
from tests.support.tiny import frozen_copy, same_bits

from kapelle import Trainer
from kapelle.environment import Enumerable
from kapelle.errors import ConfigError, EpisodeError, ParityError
from kapelle.features.league.league import League
from kapelle.features.league.policies import slot_name
from kapelle.features.league.pool import MAIN, MatchScore, dependence
from kapelle.functional.ratings import effective_diversity, ratings
from kapelle.models.weights import read_adapter, weights_hash
from kapelle.rollout.evaluation.exploitability import TabularPolicies, average, evaluate_table

ONE = {"adapter": "player"}
TINY = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 32}


def league_of(trainer: Trainer) -> League:
    league = trainer.loop.features["league"]
    assert isinstance(league, League)
    return league


def game(**over: Any) -> dict[str, Any]:
    """Two agents with one adapter, in a league of two slots."""
    return {
        "model": {"embedded": TINY},
        "team": {
            "agents": [{"name": "first", "weights": ONE}, {"name": "second", "weights": ONE}],
            "sampling": {"max_tokens": 3},
        },
        "environment": {"name": "tests.support.plugins:Digest"},
        "workflow": {"name": "parallel"},
        "algorithm": {"name": "grpo", "group_size": 4, "team_reward": "individual"},
        "training": {"steps": 6, "tasks_per_step": 4},
        "optimizer": {"lr": 1e-2},
        "evaluation": {"before_and_after": False},
        "checkpoint": {"every": 2, "keep": 2},
        "league": {"population": "fictitious", "enter": {"every": 1}, "slots": 2, "keep": 3},
        **over,
    }


KUHN = {
    "environment": {"name": "openspiel", "game": "kuhn_poker", "wording": "short"},
    "workflow": {"name": "play"},
}


def line(learners: int, every: int = 4, **over: Any) -> dict[str, Any]:
    """A league of learners that answer one another (pipeline PSRO)."""
    population = {"name": "psro", "games": 2, "learners": learners, **over}
    return {"population": population, "enter": {"every": every, "restart": True}, "slots": 3, "keep": 3}


def test_members_speak_with_the_weights_with_which_they_entered(tmp_path: Path) -> None:
    entered: dict[str, str] = {}
    with Trainer(**game(), run_dir=tmp_path / "run") as trainer:
        for step in trainer.steps():
            for group in step.groups:
                for episode in group.episodes:
                    for turn in episode.turns:
                        cast = group.task.cast.get(turn.agent)
                        if cast is None:
                            assert turn.trained
                            continue
                        assert not turn.trained
                        assert entered.setdefault(cast.player, turn.weights_hash) == turn.weights_hash
    assert len(set(entered.values())) == len(entered) >= 4
    for name, found in entered.items():
        folder = tmp_path / "run" / "league" / name / "policies" / "player"
        if folder.exists():
            assert found.endswith(weights_hash(read_adapter(folder)[0])[-8:])


def test_a_sampler_that_plays_a_member_with_other_weights_stops_the_run() -> None:
    """No one trains on members' turns, so that no update would notice."""
    with Trainer(**game()) as trainer:
        assert all(step.metrics["league/parity"] <= 1e-4 for step in trainer.steps())
    with Trainer(**game()) as trainer:
        league_of(trainer).players_of_steps[0].load = lambda *_: None
        with pytest.raises(ParityError, match="league:"):
            trainer.train()


def test_an_update_moves_no_slot() -> None:
    with Trainer(**game(league={"population": "fictitious", "enter": {"every": 100}, "slots": 2})) as trainer:
        before = None
        for _ in trainer.steps():
            now = frozen_copy(trainer.engine.weights(slot_name(0, "player")))
            assert before is None or same_bits(before, now)
            before = now


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "league",
    [
        {"population": "fictitious", "exploiter": {}},
        {"population": "pfsp", "exploiter": {}},
        {"population": {"name": "psro", "games": 2}, "exploiter": {}},
        {"population": "self_play", "exploiter": {}},
        {"population": "pfsp", "pair_games": 2},
    ],
    ids=["fictitious", "pfsp", "psro", "self_play", "pairs"],
)
def test_a_run_resumes_bit_for_bit(tmp_path: Path, league: dict[str, Any]) -> None:
    beside = "exploiter:player" if "exploiter" in league else "player"
    check_that_it_resumes(tmp_path, league, beside)


@pytest.mark.long
def test_a_line_resumes_between_two_entries(tmp_path: Path) -> None:
    """Step 4 is played against drafts of step 2, which the checkpoint of step 3 knows."""
    league = line(3, refresh=2, by="uniform")
    check_that_it_resumes(tmp_path, league, "follower:1:player", tasks=12)


def check_that_it_resumes(tmp_path: Path, league: dict[str, Any], beside: str, tasks: int = 4) -> None:
    settings = game(
        league={"enter": {"every": 1}, "slots": 2, "keep": 3, "in_memory": 1, **league},
        training={"steps": 6, "tasks_per_step": tasks},
    )

    def taken(trainer: Trainer) -> list[Any]:
        return [
            (
                {key: value for key, value in step.metrics.items() if key.startswith("league/")},
                [group.task.cast for group in step.groups],
            )
            for step in trainer.steps()
        ]

    with Trainer(**settings, run_dir=tmp_path / "whole") as whole:
        steps = taken(whole)
        expected = [frozen_copy(whole.engine.weights(policy)) for policy in ("player", beside)]
    with Trainer(**settings, run_dir=tmp_path / "again") as first:
        first.train(3)
    with Trainer(**settings, run_dir=tmp_path / "again", resume=True) as second:
        assert taken(second) == steps[3:]
        for policy, weights in zip(("player", beside), expected, strict=True):
            assert same_bits(frozen_copy(second.engine.weights(policy)), weights)


@pytest.mark.sample(3)
@pytest.mark.parametrize("population", ["self_play", "fictitious", "pfsp"])
def test_a_pool_is_as_diverse_as_the_table_of_its_past_selves_says(population: str) -> None:
    """Of a small game the table is exact for each population; elsewhere its pairs are played where `pair_games` says so."""
    pytest.importorskip("pyspiel")
    league = {"population": population, "enter": {"every": 1}, "members": {"base": "frozen"}}
    with Trainer(**game(**KUHN, league=league)) as trainer:
        rows = [step.metrics for step in trainer.steps(2)]
        pool = league_of(trainer).pool
    past = [member.name for member in pool.past]
    assert {name for _, *pair in pool.payoffs for name in pair} == set(past)
    first, second = ([[pool.payoffs[home, a, b] for b in past] for a in past] for home in ("first", "second"))
    table = (np.array(first) + np.array(second)) / 2
    assert table == pytest.approx(-table.T), "it is zero-sum"
    assert rows[-1]["league/diversity"] == pytest.approx(effective_diversity((table - table.T) / 2))
    played = {"enter": {"every": 1}, "slots": 2, "keep": 3, "population": population}
    with Trainer(**game(league={**played, "pair_games": 3})) as trainer:
        trainer.train(2)
        counts = league_of(trainer).pool.payoff_games
    assert set(counts.values()) == {3}
    assert len(counts) == 2 * 3 * 3
    with Trainer(**game(league=played)) as trainer:
        assert all("league/diversity" not in step.metrics for step in trainer.steps(1))


def test_a_broken_run_goes_on_from_members_on_the_disk(tmp_path: Path) -> None:
    settings = game(
        league={"population": "fictitious", "enter": {"every": 1}, "slots": 1, "keep": 3, "in_memory": 1}
    )
    with Trainer(**settings, run_dir=tmp_path / "whole") as whole:
        whole.train()
        expected = frozen_copy(whole.engine.weights("player"))
    with resumed(settings, tmp_path / "again", after=3) as second:
        assert same_bits(frozen_copy(second.engine.weights("player")), expected)


def test_weights_of_those_who_left_go_with_the_last_checkpoint_that_knew_them(tmp_path: Path) -> None:
    with Trainer(**game(), run_dir=tmp_path / "run") as trainer:
        trainer.train()
    names = {folder.name for folder in (tmp_path / "run" / "league").iterdir()}
    # Three are in the pool after step 6; of those who left, the checkpoint of step 4 knows some.
    assert {"start", f"{MAIN}@6", f"{MAIN}@5", f"{MAIN}@0"} <= names
    assert len(names) < 8


def test_the_exploiter_learns_against_the_learner_and_begins_anew() -> None:
    settings = game(league={"population": "fictitious", "enter": {"every": 3}, "exploiter": {"share": 0.5}})
    with Trainer(**settings) as trainer:
        own = "exploiter:player"
        start = frozen_copy(trainer.engine.weights(own))
        moved = [not same_bits(start, frozen_copy(trainer.engine.weights(own))) for _ in trainer.steps()]
        assert moved == [True, True, False, True, True, False]
        assert [name for name in league_of(trainer).pool.names if name.startswith("exploiter")] == [
            "exploiter@3",
            "exploiter@6",
        ]


def test_seats_with_adapters_of_their_own_are_played_by_their_own_past() -> None:
    team = {"agents": [{"name": "first"}, {"name": "second"}], "sampling": {"max_tokens": 3}}
    with Trainer(**game(team=team, league={"population": "fictitious", "enter": {"every": 2}})) as trainer:
        seen = {
            (turn.agent, turn.policy.rpartition(":")[2], turn.trained)
            for step in trainer.steps()
            for group in step.groups
            for episode in group.episodes
            for turn in episode.turns
        }
    assert seen == {(agent, agent, trained) for agent in ("first", "second") for trained in (True, False)}


def test_members_that_are_always_there(tmp_path: Path) -> None:
    pytest.importorskip("pyspiel")
    with Trainer(**game(**KUHN), run_dir=tmp_path / "old") as trainer:
        trainer.train(1)
    members = {"base": "frozen", "solver": "nash", "old": {"past": str(tmp_path / "old")}}
    settings = game(**KUHN, league={"population": "fictitious", "enter": None, "members": members})
    with Trainer(**settings) as trainer:
        played = {
            cast.player: cast.policy
            for step in trainer.steps()
            for group in step.groups
            for cast in group.task.cast.values()
        }
    assert played == {"base": "member:base", "nash": "", "old": "member:old:player"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("each", ["nash", "psro"])
def test_small_games_are_measured_exactly(each: str) -> None:
    pytest.importorskip("pyspiel")
    league = {"population": "psro" if each == "psro" else "fictitious", "enter": {"every": 1}}
    with Trainer(**game(**KUHN, league=league)) as trainer:
        rows = [step.metrics for step in trainer.steps(2)]
        pool = league_of(trainer).pool
    assert all(0.0 < row["league/nash_conv"] < 4.0 for row in rows)
    if each == "psro":
        assert pool.payoff_games == dict.fromkeys(pool.payoffs, 0), "nothing was played for them"
        for one in pool.names:
            for other in pool.names:  # what one wins the other loses
                assert pool.payoffs["first", one, other] == pytest.approx(-pool.payoffs["second", other, one])


LETTERS = {
    "environment": {"name": "matrix", "game": "custom", "payoffs": {"AA": (2, -2), "AB": (3, -3), "BA": (0, 0), "BB": (4, -4)}},
    "workflow": {"name": "play"},
}  # fmt: skip
"""The second player's A is better than its B whatever the first does, and the best answer to it is A."""


@pytest.mark.parametrize(
    ("own", "met"),
    [
        (True, {"first": {"self@0"}, "second": {"self@1"}}),
        (False, {"first": {"self@0"}, "second": {"self@0"}}),
    ],
    ids=["two adapters", "one adapter"],
)
def test_the_members_that_play_best_are_drawn_from_exact_tables(own: bool, met: dict[str, set[str]]) -> None:
    """One member plays B first and A second, the other A first and B second.

    With two adapters, each member is met where it plays A. With one, the first member earns (4 − 2)/2 = 1 against the other.
    """
    pytest.importorskip("scipy")
    agents = [{"name": name} if own else {"name": name, "weights": ONE} for name in ("first", "second")]
    settings = {
        "team": {"agents": agents, "sampling": {"max_tokens": 3}},
        "training": {"steps": 3, "tasks_per_step": 4},
    }
    with Trainer(
        **game(**LETTERS, **settings, league={"population": "psro", "enter": {"every": 1}})
    ) as trainer:
        trainer.train(1)
        league = league_of(trainer)
        for name, first in (("self@0", 1), ("self@1", 0)):
            moves = {"0": {first: 1.0, 1 - first: 0.0}, "1": {1 - first: 1.0, first: 0.0}}
            league.tables[name] = TabularPolicies(moves, {"0": 1.0, "1": 1.0})
        league.pool.payoffs.clear()
        league.strategies.clear()
        drawn: dict[str, set[str]] = {"first": set(), "second": set()}
        for group in next(iter(trainer.steps(1))).groups:
            [(other, cast)] = group.task.cast.items()
            drawn["first" if other == "second" else "second"].add(cast.player)
    assert drawn == met


def test_results_compare_payoffs_and_ratings_allow_for_games_of_one_deal() -> None:
    pytest.importorskip("scipy")
    league = {"population": {"name": "pfsp", "power": 2.0}, "enter": {"every": 2}}
    with Trainer(**game(league=league)) as trainer:
        score = MatchScore()
        for step in trainer.steps(2):
            for one in (one for one in step.groups if one.task.cast):
                [other] = one.task.cast
                [home] = {"first", "second"} - {other}
                score += MatchScore.of_group([each.total(home) - each.total(other) for each in one.valid])
        pool, drawn = league_of(trainer).pool, league_of(trainer).chances("first")
    assert pool.met["self@2", "self@0"] == score
    weight = 1.0 / dependence([score])
    assert weight < 1.0
    counts = (score.losses * weight, score.draws * weight, score.wins * weight)
    rating = ratings([0, 1], {(0, 1): counts}, zero=0)[1]
    row = step.metrics
    assert [row[f"league/rating{end}"] for end in ("", "_low", "_high")] == pytest.approx(rating)
    # Of the newest member, whom nobody has met, half of the points are expected.
    points = pool.scores[MAIN, "self@0"].points
    assert drawn["self@0"] / drawn["self@2"] == pytest.approx((1 - points) ** 2 / 0.25)


@pytest.mark.slow
def test_played_tables_come_near_the_exact_ones() -> None:
    """Payoffs of the same two members, by enumeration and from 100 games of each pair."""
    pytest.importorskip("scipy")
    team = {"agents": [{"name": "first", "weights": ONE}, {"name": "second", "weights": ONE}]}
    team["sampling"] = {"max_tokens": 2, "choices": "legal", "temperature": 0.7}  # type: ignore[assignment]
    league = {"population": {"name": "psro", "games": 100}, "enter": {"every": 1}}
    tables = []
    for exact in ({}, {"exact": 0}):
        with Trainer(
            **game(**LETTERS, team=team, league={**league, **exact}, optimizer={"lr": 0.1})
        ) as trainer:
            trainer.train(1)
            tables.append(dict(league_of(trainer).pool.payoffs))
    assert tables[1] == pytest.approx(tables[0], abs=0.5)
    assert max(tables[0].values()) - min(tables[0].values()) > 1.0


@pytest.mark.parametrize(
    ("over", "said"),
    [
        ({"team": {"agents": 1}}, "one agent"),
        ({"team": {"sharing": "shared", "agents": 2}}, "weights: {adapter: player}"),
        ({"league": {"enter": None}}, "has no members"),
        ({**KUHN, "league": {"members": {"x": "nahs"}}}, "no player 'nahs'"),
        ({"league": {"members": {"x": {"past": "runs/nowhere"}}}}, "runs/nowhere"),
        (
            {"league": {"members": {"self": "frozen"}}},
            "self` has the name of a learner of the league",
        ),
        (
            {"league": {**line(2), "slots": 2}},
            r"Set `league.slots` to at least `league.keep` \(3\)",
        ),
        ({"league": line(10**9)}, "adapters in memory"),
        (
            {
                "league": line(1),
                "team": {
                    "sharing": "lora",
                    "agents": [{"name": "first"}, {"name": "second", "weights": "frozen"}],
                },
            },
            "have only its role",
        ),
        (
            {"league": line(2), "algorithm": {"name": "happo", "team_reward": "individual"}},
            "one after another",
        ),
        (
            {**KUHN, "league": {"members": {"x": "nash", "y": "nash"}}},
            "nash` is the same player as `league.members.x`. Remove one of them",
        ),
        (
            {"league": {"population": "psro", "slots": 1}},
            "`psro` plays pairs of members. Set `league.slots` to at least 2",
        ),
        (
            {"league": {"population": {"name": "fcp", "partners": 2}, "leaves": "weakest"}},
            "the weakest member is unknown",
        ),
        (
            {"league": {"enter": {"every": 5, "beats": 0.9, "at_latest": 2}}},
            r"`at_latest: 2` is less than `every: 5`",
        ),
    ],
)
def test_a_league_that_cannot_be_is_refused_before_a_model_loads(over: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(**game(**over))


def test_mixtures_that_differ_share_the_slots_and_are_met_as_often_as_they_should_be() -> None:
    """Two adapters, each with a mixture of its own over four past selves, and two slots."""
    team = {"agents": [{"name": "first"}, {"name": "second"}], "sampling": {"max_tokens": 3}}
    with Trainer(
        **game(team=team, league={"population": "fictitious", "enter": {"every": 1}, "slots": 2})
    ) as trainer:
        trainer.train(3)
        league = league_of(trainer)
        assert league is not None
        names = league.pool.names
        first = dict(zip(names, (1.0, 0.0, 0.0, 0.0), strict=True))
        second = dict(zip(names, (0.0, 0.5, 0.3, 0.2), strict=True))
        steps = [league.thinned({"first": first, "second": second}, number) for number in range(600)]
    for home, wanted in (("first", first), ("second", second)):
        for name in names:
            met = sum(step[home].get(name, 0.0) for step in steps) / len(steps)
            assert met == pytest.approx(wanted[name], abs=0.06)
    assert all(len({name for own in step.values() for name in own}) <= 2 for step in steps)


def test_the_mixture_of_a_seat_is_what_the_others_expect_of_it() -> None:
    """Three seats of which the first is frozen: the second is mixed as the third expects it, and the third as the second does."""
    pytest.importorskip("pyspiel")
    environment = {**KUHN["environment"], "game": "kuhn_poker(players=3)"}
    agents = [{"name": "a", "weights": "frozen"}, {"name": "b"}, {"name": "c"}]
    team = {"agents": agents, "sampling": {"max_tokens": 3}}
    settings = game(
        environment=environment, workflow=KUHN["workflow"], team=team, league={"population": "psro", "enter": {"every": 1}},
    )  # fmt: skip
    with Trainer(**settings) as trainer:
        trainer.train(3)
        league, world = league_of(trainer), trainer.setup.environment
        assert league is not None
        assert isinstance(world, Enumerable)
        draw = random.Random(0)
        for member in league.pool.past:  # policies that differ, as these hardly do after three steps
            weights = {each.key: [draw.random() for _ in each.actions] for each in world.decisions()}
            league.tables[member.name] = TabularPolicies(
                {
                    each.key: {
                        action: weight / sum(weights[each.key])
                        for action, weight in zip(each.actions, weights[each.key], strict=True)
                    }
                    for each in world.decisions()
                },
                dict.fromkeys(weights, 1.0),
            )
        tables = [league.tables[member.name] for member in league.pool.past]
        shares = {"b": (0.7, 0.1, 0.1, 0.1), "c": (0.1, 0.1, 0.1, 0.7)}
        own = tuple(member.name for member in league.pool.members)
        league.strategies[own] = {home: dict(zip(own, share, strict=True)) for home, share in shares.items()}
        found = league.measured()["league/nash_conv_mixture"]
    mixed = {
        0: average(world, tables),
        1: average(world, tables, shares["c"]),
        2: average(world, tables, shares["b"]),
    }
    chances = {each.key: mixed[each.player].chances[each.key] for each in world.decisions()}
    assert found == pytest.approx(evaluate_table(world, replace(mixed[0], chances=chances)).nash_conv)
    turned = {
        each.key: mixed[3 - each.player if each.player else 0].chances[each.key] for each in world.decisions()
    }
    assert found != pytest.approx(evaluate_table(world, replace(mixed[0], chances=turned)).nash_conv)


def test_partners_learn_alone_and_then_the_learner_with_all_of_them() -> None:
    """Fictitious co-play: three steps of two partners, three of the learner."""
    population = {"name": "fcp", "partners": 2}
    with Trainer(**game(league={"population": population, "enter": {"every": 1}, "slots": 4})) as trainer:
        moved = []
        names = ("player", "partner:0:player", "partner:1:player")
        before = {name: frozen_copy(trainer.engine.weights(name)) for name in names}
        met = []
        for step in trainer.steps():
            now = {name: frozen_copy(trainer.engine.weights(name)) for name in names}
            moved.append([not same_bits(before[name], now[name]) for name in names])
            before = now
            met.append({each.player for group in step.groups for each in group.task.cast.values()})
        members = league_of(trainer).pool.names
    assert moved == [[False, True, True]] * 3 + [[True, False, False]] * 3
    assert met[:3] == [{"partner_0", "partner_1"}] * 3
    assert all(each <= set(members) and each for each in met[3:])
    assert members == ["self@0", *(f"partner_{k}@{step}" for step in (1, 2, 3) for k in (0, 1))]


def steps_of_a_line(trainer: Trainer) -> tuple[list[dict[str, Any]], dict[str, set[str]]]:
    """Return the learners' weights after each step, and whom each learner met."""
    names = ("player", "follower:0:player", "follower:1:player")
    rows, met = [], dict[str, set[str]]()
    for step in trainer.steps():
        rows.append({name: frozen_copy(trainer.engine.weights(name)) for name in names})
        learning = []
        for group in step.groups:
            own = [a for a, each in group.task.cast.items() if each.policy.startswith("follower:")]
            learner = group.task.cast[own[0]].player if own else MAIN
            learning.append(learner)
            others = {each.player for agent, each in group.task.cast.items() if agent not in own}
            met.setdefault(f"{step.number} {learner}", set()).update(others)
            for episode in group.episodes:
                assert {turn.policy for turn in episode.turns if turn.trained} == {
                    "player" if learner == MAIN else f"follower:{learner[-1]}:player"
                }
        assert sorted(learning) == sorted(["follower_0", "follower_1", MAIN] * 4), "each in as many tasks"
    return rows, met


def test_each_learner_of_a_line_answers_those_before_it_and_goes_to_its_end_when_it_has_entered() -> None:
    """Pipeline PSRO, by a uniform meta-strategy, in which everyone is met."""
    league = line(3, every=2, refresh=1, by="uniform")
    settings = game(
        league=league, training={"steps": 6, "tasks_per_step": 12}, checkpoint={"every": 6}, seed=3
    )
    with Trainer(**settings) as trainer:
        start = {name: frozen_copy(own) for name, own in learners_of(trainer).items()}
        rows, met = steps_of_a_line(trainer)
        own = league_of(trainer)
        assert own is not None
        assert own.pool.names == ["self@0", "follower_0@4", "follower_1@6"], "three are kept"
        assert [draft.name for draft in own.pool.drafts] == ["draft-self@6", "draft-follower_0@6"]
        kept = own.snapshots.of("draft-self@6", ["player"])["player"]
        assert same_bits(frozen_copy(kept), rows[-1]["player"])
    assert met["1 self"] == {"self@0"}
    assert met["1 follower_0"] == {"self@0", "draft-self@0"}
    assert met["1 follower_1"] == {"self@0", "draft-self@0", "draft-follower_0@0"}
    # The first has entered after step 2, and is last now.
    assert met["3 follower_0"] == {"self@0", "self@2"}
    assert met["3 follower_1"] == {"self@0", "self@2", "draft-follower_0@2"}
    assert met["4 self"] == {"self@0", "self@2", "draft-follower_0@3", "draft-follower_1@3"}
    begun = [[same_bits(row[name], start[name]) for name in row] for row in rows]
    assert begun == [
        [False, False, False],
        [True, False, False],
        [False, False, False],
        [False, True, False],
        [False, False, False],
        [False, False, False],  # no one begins again after the last step
    ]


def learners_of(trainer: Trainer) -> dict[str, Any]:
    return {
        name: trainer.engine.weights(name) for name in ("player", "follower:0:player", "follower:1:player")
    }


@pytest.mark.sample(2)
def test_who_begins_anew_learns_from_no_game_that_it_played_before() -> None:
    training = {"steps": 6, "tasks_per_step": 4, "max_staleness": 2}
    tasks = {"replay": {"groups": 1}}
    league = {"population": "psro", "enter": {"every": 2, "restart": True}, "slots": 2}
    league["population"] = {"name": "psro", "games": 2}
    ages = []
    with Trainer(**game(league=league, training=training, tasks=tasks)) as trainer:
        born = 0
        for step in trainer.steps():
            versions = {
                turn.version
                for group in step.groups
                for each in group.episodes
                for turn in each.turns
                if turn.trained
            }
            assert min(versions) >= born, "games of who has entered"
            ages.append(step.metrics["staleness"])
            again = trainer.loop.features["tasks.replay"].kept  # type: ignore[attr-defined]
            assert {
                turn.version >= born
                for _, group in again
                for each in group.episodes
                for turn in each.turns
                if turn.trained
            } <= {True}
            if league_of(trainer).restarted:
                born = trainer.engine.versions["player"]
    assert ages == [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]


def test_what_a_killed_process_left_goes_when_no_checkpoint_names_it(tmp_path: Path) -> None:
    """The league's state is the same whether a checkpoint was tidied before the kill or not."""
    settings = game(league=line(2, every=100, refresh=1), checkpoint={"every": 2, "keep": 1})
    with Trainer(**settings, run_dir=tmp_path / "run") as trainer:
        trainer.train(3)
        kept = league_of(trainer)
        assert kept is not None
        state, resting = kept.state(), tmp_path / "run" / "league"
    shutil.copytree(resting / "draft-self@3", resting / "draft-self@1")
    with Trainer(**settings, run_dir=tmp_path / "run", resume=True) as trainer:
        league = league_of(trainer)
        assert league is not None
        assert league.state() == state
        assert list(league.pool.gone["draft-self@1"]) == [1, 3]
        trainer.train()
    assert not (resting / "draft-self@1").exists()


@pytest.mark.long
def test_members_of_a_step_that_is_repeated_are_seated_with_their_own_weights() -> None:
    """Names stand for other weights when steps are played again and come out otherwise."""
    with Trainer(**game(league=line(2, every=1, refresh=1))) as trainer:
        league = league_of(trainer)
        assert league is not None
        league.assignments(1)
        before = league.state()
        trainer.train(1)
        league.load_state(before)
        changed = {key: own + 1.0 for key, own in trainer.engine.weights("player").items()}
        league.snapshots.put("self@0", {"player": changed})
        league.assignments(1)
        slot = next(slot for slot, name in league.in_slot.items() if name == "self@0")
        assert same_bits(frozen_copy(trainer.engine.weights(slot_name(slot, "player"))), frozen_copy(changed))


def test_a_step_whose_table_could_not_be_played_is_taken_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = game(
        league=line(2, every=100, refresh=1, by="uniform"),
        algorithm={"name": "grpo", "group_size": 4, "team_reward": "individual", "epochs": 2},
    )
    with Trainer(**settings, run_dir=tmp_path / "run") as trainer:
        trainer.train(1)
        trainer.save()
        with monkeypatch.context() as broken:
            broken.setattr("kapelle.features.league.league.shared_rollout", lambda *_: [])
            with pytest.raises(EpisodeError, match="games of"):
                trainer.train(1)
        assert [step.number for step in trainer.steps(2)] == [2, 3]


def spread(by: float, **over: Any) -> dict[str, Any]:
    """Two partners of fictitious co-play who begin apart."""
    population = {"name": "fcp", "partners": 2, "spread": by}
    return game(league={"population": population, "enter": {"every": 1}, "slots": 4}, **over)


def test_a_spread_lets_partners_begin_apart_and_the_learner_as_its_base() -> None:
    names = ("player", "partner:0:player", "partner:1:player")
    starts = []
    for by in (0.0, 0.3, 0.3):
        with Trainer(**spread(by)) as trainer:
            starts.append({name: frozen_copy(trainer.engine.weights(name)) for name in names})
    same, apart, again = starts
    for name in names:
        assert same_bits(apart[name], again[name])
        moved = {key for key, own in apart[name].items() if not torch.equal(own, same[name][key])}
        assert moved == (set() if name == "player" else {key for key in same[name] if "lora_B" in key})
    drawn = torch.stack(
        [
            torch.cat([own.flatten() for key, own in apart[name].items() if "lora_B" in key])
            for name in names[1:]
        ]
    )
    assert drawn.std(dim=1).tolist() == pytest.approx([0.3, 0.3], rel=0.1)
    assert abs(torch.corrcoef(drawn)[0, 1].item()) < 0.2


def test_a_spread_reaches_what_plays() -> None:
    with Trainer(**spread(0.3, training={"tasks_per_step": 4})) as trainer:
        assert next(iter(trainer.steps())).metrics["parity/max"] < 1e-4


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_a_team_loses_with_members_is_recorded_where_all_earn_alike(share: float) -> None:
    levers = {"name": "matrix", "game": "custom", "payoffs": {"AA": [1, 1], "AB": [0.5, 0.5], "BA": [0.5, 0.5], "BB": [2, 2]}}  # fmt: skip
    league = {"population": {"name": "fictitious", "share": share}, "enter": {"every": 1}, "slots": 2}
    with Trainer(**game(environment=levers, workflow={"name": "play"}, league=league)) as trainer:
        seen = 0
        for step in trainer.steps():
            returns: dict[bool, list[float]] = {False: [], True: []}
            for group in step.groups:
                returns[bool(group.task.cast)] += [episode.total("first") for episode in group.valid]
            found = step.metrics.get("league/cross_play_gap")
            if not (returns[True] and returns[False]):
                assert found is None
                continue
            seen += 1
            alone, with_members = (sum(own) / len(own) for own in (returns[False], returns[True]))
            assert found == pytest.approx(alone - with_members)
    assert bool(seen) is (share < 1.0)
