"""Games through the environment are those that OpenSpiel recorded: every state, legal action and return."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from kapelle.environments.openspiel.environment import GameState, OpenSpiel, Players
from kapelle.environments.openspiel.text import plain_move, read_listed

pytestmark = pytest.mark.data

FOLDER = "reference/openspiel_playthroughs"
GAMES = (
    "coin_game",
    "connect_four",
    "goofspiel",
    "hanabi",
    "kuhn_poker_2p",
    "leduc_poker_1540482260",
    "liars_dice",
    "matrix_pd",
    "matrix_sh",
    "negotiation_rng_seed100_utterance_dim2_num_symbols3",
    "nim",
    "pig_3p",
    "repeated_game_stage_gamematrix_rps__num_repetitions10",
    "tic_tac_toe",
    "tiny_hanabi",
    "trade_comm",
)


class Recorded(random.Random):
    """Draws the given actions of chance."""

    def __init__(self, drawn: Sequence[int]) -> None:
        super().__init__(0)
        self._drawn = list(drawn)

    def choices(self, population: Any, *_: Any, **__: Any) -> list[Any]:
        drawn = self._drawn.pop(0)
        assert drawn in population, "the draw is possible"
        return [drawn]


def states(name: str) -> tuple[str, list[dict[str, str]]]:
    """Return the game and, for every recorded state, its fields and the action that followed."""
    data = os.environ.get("KAPELLE_DATA")
    file = Path(data or ".").parent / FOLDER / f"{name}.txt"
    if not data or not file.is_file():
        pytest.skip(f"needs {FOLDER} beside the folder that KAPELLE_DATA names")
    head, *parts = re.split(r"^# State \d+$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    fields = [
        dict(re.findall(r"^([A-Za-z]+(?:\(\d*\))?|actions?)(?: =|:) (.*)$", part, re.MULTILINE))
        for part in parts
    ]
    game = re.search(r"^game: (.*)$", head, re.MULTILINE)
    assert game
    return game[1], fields


def chance_draws(game: Any, history: Sequence[int]) -> list[int]:
    """Return those actions of a history that chance made."""
    state, drawn, place = game.new_initial_state(), [], 0
    while place < len(history):
        if state.is_chance_node():
            drawn.append(history[place])
        if state.is_simultaneous_node():
            state.apply_actions(list(history[place : place + game.num_players()]))
            place += game.num_players()
        else:
            state.apply_action(history[place])
            place += 1
    return drawn


@pytest.mark.parametrize("name", GAMES)
async def test_a_recorded_game_is_reproduced_state_by_state(name: str) -> None:
    written, recorded = states(name)
    environment = OpenSpiel(game=written)
    game = environment.loaded
    agents = {f"p{player}": (player,) for player in range(game.num_players())}
    drawn = Recorded(chance_draws(environment.loaded, json.loads(recorded[-1]["History()"])))
    world = GameState(game, Players(agents, {}), environment.conduct, drawn, seed=0)
    place = compared = 0
    totals = dict.fromkeys(agents, 0.0)
    for fields in recorded:
        state, here = world.state, place
        place += len(json.loads(fields["actions"])) if "actions" in fields else 1
        if len(state.history()) > here:
            continue  # chance moved here
        if "History()" in fields:
            compare(world, fields, game.num_players())
            compared += 1
        if not state.is_terminal():
            moves = recorded_moves(fields, state)
            assert world.movers() == tuple(f"p{player}" for player in moves)
            texts = {
                f"p{player}": plain_move(state.action_to_string(player, action))
                for player, action in moves.items()
            }
            for agent, reward in (await world.step(texts)).items():
                totals[agent] += reward
    assert compared >= 2
    assert world.state.is_terminal()
    returns = json.loads(recorded[-1]["Returns()"])
    for agent, reward in world.outcome().rewards.items():
        totals[agent] += reward
    assert list(totals.values()) == pytest.approx(returns)
    assert not world.outcome().truncated


def compare(world: GameState, fields: dict[str, str], players: int) -> None:
    """Assert that the world's state is the recorded one, and that players are shown its legal moves."""
    state = world.state
    assert state.history() == json.loads(fields["History()"])
    assert state.is_terminal() == (fields["IsTerminal()"] == "True")
    for player in range(players):
        if f"InformationStateString({player})" in fields:
            assert state.information_state_string(player) == json.loads(
                fields[f"InformationStateString({player})"]
            )
        if f"ObservationString({player})" in fields:
            assert state.observation_string(player) == json.loads(fields[f"ObservationString({player})"])
    if state.is_terminal():
        return
    for player, (legal, names) in recorded_legal(fields, state).items():
        assert state.legal_actions(player) == legal
        assert [state.action_to_string(player, action) for action in legal] == names
        shown = read_listed(world.observe(f"p{player}"))
        assert len(shown) == len(set(shown)) == len(legal)


def recorded_moves(fields: dict[str, str], state: Any) -> dict[int, int]:
    if "actions" in fields:
        return dict(enumerate(json.loads(fields["actions"])))
    return {state.current_player(): int(fields["action"])}


def recorded_legal(fields: dict[str, str], state: Any) -> dict[int, tuple[list[int], list[str]]]:
    if "LegalActions()" in fields:
        names = json.loads(fields["StringLegalActions()"])
        return {state.current_player(): (json.loads(fields["LegalActions()"]), names)}
    return {
        player: (
            json.loads(fields[f"LegalActions({player})"]),
            json.loads(fields[f"StringLegalActions({player})"]),
        )
        for player in range(state.num_players())
        if f"LegalActions({player})" in fields
    }
