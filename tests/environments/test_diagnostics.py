"""Diagnostic environments: exact values agree with the rewards of episodes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from statistics import fmean
from typing import Any

import pytest
from pydantic import ValidationError

from kapelle.environment import environment_class
from kapelle.environments.diagnostics import Diagnostic, SumGame
from kapelle.errors import ConfigError, EpisodeError

GAMES: tuple[Mapping[str, Any], ...] = (
    {"name": "sum_game", "seats": 3, "letters": 2, "riders": 1, "number_of_cases": 2},
    {"name": "sum_game", "seats": 2, "letters": 3, "pays": "all"},
    {"name": "relay", "seats": 2, "letters": 3},
    {"name": "hidden_sign", "seats": 2, "letters": 2},
    {"name": "speaker", "seats": 3, "letters": 2},
    {"name": "speaker", "seats": 2, "letters": 3, "speaker": "lies"},
    {"name": "speaker", "seats": 3, "letters": 2, "speaker": "leads"},
    {"name": "long_game", "seats": 2, "letters": 2, "rounds": 2},
    {"name": "long_game", "seats": 1, "letters": 3, "rounds": 2, "rewarded": "at_the_end"},
    {"name": "essay", "seats": 2, "letters": 2, "place": 1},
    {"name": "sum_game", "seats": 3, "letters": 3, "roles": 2},
    {"name": "unequal", "seats": 2, "letters": 3, "right_letters": (2, 1), "anyway": (0.0, 0.5)},
    {"name": "sum_game", "seats": 3, "letters": 2, "riders": 1, "weights": (1.0, 0.25)},
)


def game_of(settings: Mapping[str, Any]) -> Diagnostic:
    game = environment_class(settings["name"])(**settings)
    assert isinstance(game, Diagnostic)
    return game


async def played(
    game: Diagnostic, case: int, say: Mapping[tuple[int, str], str]
) -> tuple[dict[str, float], float]:
    names = [f"agent_{k}" for k in range(game.seats)]
    world = game.start(game.task("train", case), names, 0)
    total = dict.fromkeys(names, 0.0)
    while movers := world.movers():
        views = {name: world.observe(name) for name in names}
        texts = {name: say[names.index(name), views[name]] for name in movers}
        for name, reward in (await world.step(texts)).items():
            total[name] += reward
    outcome = world.outcome()
    assert outcome.success is not None
    return {name: total[name] + outcome.rewards[name] for name in names}, outcome.success


def views_of(game: Diagnostic) -> list[tuple[int, str]]:
    """Return every seat with each of its possible observations."""
    found: dict[tuple[int, str], None] = {}
    for case in range(game.cases):
        open_: list[tuple[tuple[int, str], ...]] = [()]
        while open_:
            history = open_.pop()
            movers = game.movers(case, history)
            found |= {(seat, game.sees(case, seat, history)): None for seat in movers}
            if movers:
                open_ += [
                    (*history, *zip(movers, texts, strict=True))
                    for texts in itertools.product(game.texts, repeat=len(movers))
                ]
    return list(found)


@pytest.mark.parametrize("settings", GAMES, ids=str)
async def test_expected_rewards_are_those_of_episodes(settings: Mapping[str, Any]) -> None:
    game = game_of(settings)
    views = views_of(game)
    draw = random.Random(0)
    for _ in range(3):
        say = {view: draw.choice(game.texts) for view in views}
        rewards = [await played(game, case, say) for case in range(game.cases)]
        earned = [fmean(each[0][f"agent_{seat}"] for each in rewards) for seat in range(game.seats)]
        assert game.expected(lambda *view: {say[view]: 1.0}) == pytest.approx(earned)  # noqa: B023
        assert all(0.0 <= success <= 1.0 for _, success in rewards)


@pytest.mark.parametrize("settings", GAMES, ids=str)
def test_no_team_exceeds_the_optimum(settings: Mapping[str, Any]) -> None:
    game = game_of(settings)
    views = views_of(game)
    values = [
        sum(game.expected(lambda *view: {say[view]: 1.0}))  # noqa: B023
        for texts in itertools.product(game.texts, repeat=len(views))
        for say in [dict(zip(views, texts, strict=True))]
    ]
    known = game.landmarks()
    assert known["optimum"] == pytest.approx(max(values))
    assert known["chance"] == pytest.approx(fmean(values))
    assert known["chance"] <= known["best single agent"] <= known["optimum"] + 1e-12
    assert known["each replies to chance"] <= known["optimum"] + 1e-12


def test_seats_of_one_role_share_a_letter() -> None:
    game = SumGame(seats=4, letters=4, roles=2, number_of_cases=2)
    assert [[game.right(case, seat, ()) for seat in range(4)] for case in (0, 1)] == [
        ["A", "B", "A", "B"],
        ["B", "C", "B", "C"],
    ]


async def test_weights_divide_the_reward() -> None:
    game = SumGame(seats=3, letters=2, riders=1, weights=(3.0, 1.0))
    say = {(0, "1/3 0"): "B", (1, "2/3 0"): "B", (2, "3/3 0"): "A"}
    rewards, success = await played(game, 0, say)
    assert rewards == {"agent_0": 0.0, "agent_1": 0.25, "agent_2": 0.0}
    assert success == 0.25


async def test_noise_flips_a_reward() -> None:
    game = SumGame(seats=2, letters=2, noise=1.0)
    say = {(0, "1/2 0"): "A", (1, "2/2 0"): "A"}
    rewards, success = await played(game, 0, say)
    assert rewards == {"agent_0": 0.5, "agent_1": 1.0}  # 1 − 1/2, and 1 − 0
    assert success == 0.5


async def test_the_success_of_a_speaker_is_that_of_its_listeners() -> None:
    game = game_of({"name": "speaker", "seats": 3, "letters": 3})
    rewards, success = await played(game, 1, {(0, "1/3 B"): "C", (1, "2/3 C"): "B", (2, "3/3 C"): "C"})
    assert rewards == {"agent_0": 0.5, "agent_1": 0.5, "agent_2": 0.0}
    assert success == 0.5


async def test_a_leader_must_write_a_letter() -> None:
    game = game_of({"name": "speaker", "letters": 3, "speaker": "leads"})
    rewards, _ = await played(game, 0, {(0, "1/2"): "B", (1, "2/2 B"): "B"})
    assert rewards == {"agent_0": 1.0, "agent_1": 1.0}
    rewards, success = await played(game, 0, {(0, "1/2"): "?", (1, "2/2 ?"): "?"})
    assert rewards == {"agent_0": 0.0, "agent_1": 0.0}
    assert success == 0.0


@pytest.mark.parametrize("speaker", ["helps", "lies", "leads"])
async def test_other_play_renames_letters_and_keeps_rewards(speaker: str) -> None:
    known = {"name": "speaker", "seats": 3, "letters": 4, "speaker": speaker}
    plain, renamed = game_of(known), game_of({**known, "other_play": True})
    names = ["a", "b", "c"]
    met = set()
    for seed in range(20):
        task = plain.task("train", 2)
        worlds = plain.start(task, names, seed), renamed.start(task, names, seed)
        called = [renamed.renamed(seat, seed) for seat in range(3)]
        met.add((called[1]["A"], called[2]["A"]))
        assert called[0] == {letter: letter for letter in "ABCD"}
        assert sorted(called[1].values()) == sorted(called[2].values()) == list("ABCD")
        assert worlds[0].observe("a") == worlds[1].observe("a")
        rewards = [await world.step({"a": "C"}) for world in worlds]
        for seat, name in ((1, "b"), (2, "c")):
            assert worlds[0].observe(name) == f"{seat + 1}/3 C"
            assert worlds[1].observe(name) == f"{seat + 1}/3 {called[seat]['C']}"
        texts = {"b": "C", "c": "A"}
        rewards += [
            await worlds[0].step(texts),
            await worlds[1].step({name: called[names.index(name)][text] for name, text in texts.items()}),
        ]
        assert rewards[0] == rewards[1] == {}
        assert rewards[2] == rewards[3]
        assert worlds[0].outcome() == worlds[1].outcome()
    assert len(met) > 8


def test_with_other_play_codes_lose_their_reward() -> None:
    """All codes are equally good until the hearer's letters are renamed."""
    game = game_of({"name": "speaker", "letters": 3})
    known = game_of({"name": "speaker", "letters": 3, "other_play": True})

    def reward(code: str, seeds: int) -> float:
        """Return the reward of a pair that uses a letter of the code for each letter of the alphabet."""
        total = 0.0
        for seed in range(seeds):
            called = known.renamed(1, seed)
            for case, letter in enumerate("ABC"):
                received = called[code["ABC".index(letter)]]
                answer = "ABC"[code.index(received)]
                total += called["ABC"[case]] == answer
        return total / seeds / 3

    for code in ("ABC", "BCA", "BAC"):
        policy = {
            **{(0, f"1/2 {letter}"): code["ABC".index(letter)] for letter in "ABC"},
            **{(1, f"2/2 {letter}"): "ABC"[code.index(letter)] for letter in "ABC"},
        }
        assert game.expected(lambda *view: {policy[view]: 1.0})[1] == pytest.approx(1.0)  # noqa: B023
    assert reward("ABC", 100) == 1.0
    assert reward("BCA", 300) == pytest.approx(
        0.5, abs=0.1
    )  # even renamings commute with it, odd ones do not
    assert reward("BAC", 300) == pytest.approx(1 / 3, abs=0.1)  # only itself commutes with it


async def test_only_movers_may_act() -> None:
    world = game_of(GAMES[2]).start(game_of(GAMES[2]).task("train", 0), ["a", "b"], 0)
    with pytest.raises(EpisodeError, match="turn"):
        await world.step({"b": "A"})


def test_unfit_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match="seats: 3"):
        SumGame(seats=2).check(["a", "b", "c"])
    for name, wrong in (
        ("sum_game", {"seats": 2, "riders": 2}),
        ("sum_game", {"seats": 2, "weights": (1.0, 1.0, 1.0)}),
        ("sum_game", {"seats": 2, "riders": 1, "weights": (1.0, 1.0)}),
        ("sum_game", {"seats": 2, "weights": (1.0, -1.0)}),
        ("sum_game", {"seats": 2, "weights": (1.0, 0.5), "pays": "all"}),
        ("speaker", {"seats": 1}),
        ("essay", {"place": 4, "longest": 4}),
        ("unequal", {"right_letters": (9,)}),
        ("unequal", {"right_letters": (1, 1), "anyway": (0.5,)}),
        ("unequal", {"anyway": (0.5, 1.0)}),
    ):
        with pytest.raises(ValidationError):
            environment_class(name)(**wrong)
