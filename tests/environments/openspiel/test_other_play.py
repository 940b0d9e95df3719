"""Hanabi with renamed colours: the game stays the same, and observations reveal nothing of the names."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from kapelle.environments.openspiel.environment import OpenSpiel, legal_moves, show
from kapelle.environments.openspiel.hanabi import Colours
from kapelle.errors import ConfigError

SMALL: dict[str, Any] = {"players": 3, "colors": 3, "ranks": 3, "hand_size": 2, "max_life_tokens": 3}
NAMES = {"R": "G", "Y": "R", "G": "Y"}


def game_of(**settings: Any) -> OpenSpiel:
    return OpenSpiel(game="hanabi", parameters=SMALL, rules="none", view="observation", **settings)


def called(action: str) -> str:
    """Return an action in the game with renamed colours."""
    if action.startswith("(Deal"):
        return f"(Deal {NAMES[action[6]]}{action[7:]}"
    return Colours(NAMES).move(action)


@pytest.mark.parametrize("wording", ["full", "short", "columns"])
@pytest.mark.parametrize("seed", range(2))
def test_an_observation_is_that_of_a_game_with_renamed_colours(wording: Any, seed: int) -> None:
    game = game_of(wording=wording)
    rules = game.conduct
    renaming = replace(rules, colours=Colours(NAMES))
    draw = random.Random(seed)
    state, other = game.loaded.new_initial_state(), game.loaded.new_initial_state()
    moves = 0
    while not state.is_terminal():
        player = state.current_player()
        legal = state.legal_actions()
        if not state.is_chance_node():
            for each in range(3):
                assert show(state, each, renaming) == show(other, each, rules)
            assert sorted(legal_moves(state, player, renaming)) == sorted(legal_moves(other, player, rules))
            moves += 1
        action = draw.choice(legal)
        state_action = state.action_to_string(player, action)
        there = {other.action_to_string(other.current_player(), each): each for each in other.legal_actions()}
        state.apply_action(action)
        other.apply_action(there[called(state_action)])
    assert moves > 3
    assert state.returns() == other.returns()


@pytest.mark.parametrize("wording", ["full", "short", "columns"])
async def test_moves_under_own_names_give_the_same_game(wording: Any) -> None:
    plain, renamed = (
        game_of(wording=wording, chance="task"),
        game_of(wording=wording, chance="task", other_play=True),
    )
    equal = set()
    for seed in range(3):
        names = ["a", "b", "c"]
        task = plain.task("train", seed)
        worlds = plain.start(task, names, seed), renamed.start(task, names, seed)
        draw = random.Random(seed)
        while movers := worlds[0].movers():
            assert worlds[1].movers() == movers
            (agent,) = movers
            player = names.index(agent)
            states = [world.state for world in worlds]
            assert states[0].history() == states[1].history()
            place = draw.randrange(len(states[0].legal_actions()))
            texts = [legal_moves(world.state, player, world.rules_of(player))[place] for world in worlds]
            equal.add(texts[0] == texts[1])
            rewards = [await world.step({agent: text}) for world, text in zip(worlds, texts, strict=True)]
            assert rewards[0] == rewards[1]
        assert worlds[0].outcome() == worlds[1].outcome()
    assert equal == {True, False}


def test_the_first_player_keeps_its_names() -> None:
    game = game_of(wording="short", other_play=True)
    views: list[set[str]] = [set(), set()]
    for seed in range(12):
        world = game.start(game.task("train", 0), ["a", "b", "c"], seed)
        fixed = game_of(wording="short").start(game.task("train", 0), ["a", "b", "c"], seed)
        assert world.observe("a") == fixed.observe("a")
        for k, agent in enumerate("bc"):
            views[k].add(str(world.observe(agent) == fixed.observe(agent)))
    assert all("False" in found for found in views)


def test_other_games_have_no_colours() -> None:
    with pytest.raises(ConfigError, match="other_play"):
        OpenSpiel(game="kuhn_poker", other_play=True).check(["a", "b"])
