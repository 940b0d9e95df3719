"""Rewards during OpenSpiel's games belong to the correct turns, and add up to their returns."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from tests.workflows.stage import play

from kapelle.algorithms.mars import MARS
from kapelle.engines.rollout.protocol import Request
from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.environments.openspiel.text import read_listed
from kapelle.rows import Signals, TurnKey
from kapelle.setup.recipe import load_recipe
from kapelle.types import Episode, Group
from kapelle.workflows.play import PlayWorkflow

DURING: list[tuple[str, Mapping[str, Any]]] = [
    ("2048", {}),
    ("cliff_walking", {"horizon": 20}),
    ("coop_box_pushing", {"horizon": 12}),
    ("deep_sea", {}),
    ("hanabi_very_small", {}),
    ("hanabi_small", {"players": 3}),
    ("hanabi_full", {"players": 5}),
    ("laser_tag", {"horizon": 40}),
    ("morpion_solitaire", {}),
    ("pathfinding", {"horizon": 20}),
    ("repeated_game(stage_game=matrix_pd(),num_repetitions=4)", {}),
    ("solitaire", {}),
    ("stones_and_gems", {}),
]
"""Games with rewards during play."""
AT_THE_END: list[tuple[str, Mapping[str, Any]]] = [
    ("kuhn_poker", {"players": 3}),
    ("tic_tac_toe", {}),
    ("negotiation", {}),
    ("goofspiel", {"num_cards": 4}),
    ("coin_game", {}),
]


def wanderer(request: Request) -> str:
    draw = random.Random(f"{request.seed}/{request.agent}")
    return draw.choice(read_listed(request.messages[-1].content))


async def wander(environment: OpenSpiel, seed: int) -> Episode:
    agents = [f"p{player}" for player in range(environment.loaded.num_players())]
    scripts = dict.fromkeys(agents, wanderer)
    [episode] = await play(
        environment, PlayWorkflow(max_rounds=400), agents, scripts, environment.task("train", seed), seed=seed
    )
    assert episode.error is None, episode.error
    return episode


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parameters"), [*DURING, *AT_THE_END])
async def test_turns_and_terminal_rewards_add_up_to_the_games_returns(
    name: str, parameters: Mapping[str, Any]
) -> None:
    episode = await wander(OpenSpiel(game=name, parameters=parameters), 0)
    assert [episode.total(agent) for agent in episode.agents] == pytest.approx(
        episode.info["returns"], rel=1e-12, abs=1e-9
    )
    during_play = any(turn.reward for turn in episode.turns)
    at_the_end = any(episode.rewards.values())
    if (name, parameters) in AT_THE_END:
        assert not during_play
    else:
        assert not at_the_end


async def replayed(environment: OpenSpiel, episode: Episode) -> list[tuple[int, list[float]]]:
    """Return the mover and OpenSpiel's rewards of each move of a turn-based game."""
    state = environment.loaded.new_initial_state()
    world = environment.start(episode.task, episode.agents, episode.seed)
    turns = iter(episode.turns)
    while movers := world.movers():
        await world.step({movers[0]: next(turns).text})
    found: list[tuple[int, list[float]]] = []
    for action in world.state.history():
        mover = -1 if state.is_chance_node() else state.current_player()
        state.apply_action(action)
        if mover >= 0:  # after chance OpenSpiel repeats the last move's rewards
            found.append((mover, state.rewards()))
    return found


@pytest.mark.parametrize(("name", "parameters"), DURING[4:7])
async def test_a_reward_belongs_to_the_last_turn_of_its_agent_or_to_its_first(
    name: str, parameters: Mapping[str, Any]
) -> None:
    environment = OpenSpiel(game=name, parameters=parameters)
    some = 0
    for seed in range(6):
        episode = await wander(environment, seed)
        expected = [0.0] * len(episode.turns)
        first = {agent: episode.by(agent)[0].index for agent in episode.agents if episode.by(agent)}
        for place, (mover, rewards) in enumerate(await replayed(environment, episode)):
            assert episode.turns[place].agent == f"p{mover}"
            for player, reward in enumerate(rewards):
                spoken = [turn.index for turn in episode.by(f"p{player}") if turn.index <= place]
                if f"p{player}" in first:
                    expected[max(spoken, default=first[f"p{player}"])] += reward
                some += reward > 0
        assert [turn.reward for turn in episode.turns] == expected
    assert some


async def test_an_agent_without_a_turn_is_rewarded_at_the_end() -> None:
    environment = OpenSpiel(game="hanabi_very_small")
    for seed in range(200):
        world = environment.start(environment.task("train", seed), ["a", "b"], seed)
        fits = [move for move in read_listed(world.observe("a")) if move.startswith("Play")]
        assert await world.step({"a": fits[0]}) in ({"a": 0.0}, {"a": 1.0})
        if world.state.returns()[0] == 1.0:
            assert world.outcome().rewards == {"a": 0.0, "b": 1.0}
            return
    raise AssertionError("no card fits")


async def test_turns_of_one_agent_have_different_returns_with_the_recipe_of_mars() -> None:
    """2510.15414: a turn's return-to-go sums the rewards from it on, so that it falls after a played card."""
    config = load_recipe("mars_hanabi_lora").config
    environment, algorithm = config.environment, config.algorithm
    assert isinstance(environment, OpenSpiel)
    assert isinstance(algorithm, MARS)
    episodes = [trained(await wander(environment, seed)) for seed in range(40)]
    groups = [Group(episode.task, (episode,)) for episode in episodes]
    credit = algorithm.credit(groups, Signals())
    drops = 0
    for g, episode in enumerate(episodes):
        for agent in episode.agents:
            own = episode.by(agent)
            to_go = [sum(turn.reward for turn in own[k:]) for k in range(len(own))]
            given = [float(credit[TurnKey(g, 0, turn.index)].advantage_T[0]) for turn in own]
            for k in range(len(own) - 1):
                assert (given[k] > given[k + 1]) == (to_go[k] > to_go[k + 1])
                drops += given[k] != given[k + 1]
    assert drops > 20


def trained(episode: Episode) -> Episode:
    return replace(episode, turns=tuple(replace(turn, trained=True) for turn in episode.turns))
