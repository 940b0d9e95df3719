"""Demonstrations in Hanabi are the moves of the scripted player."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import pytest

from kapelle.environments.openspiel.environment import OpenSpiel, show, understand
from kapelle.environments.openspiel.games import Demonstrator
from kapelle.environments.openspiel.hanabi import choose
from kapelle.errors import ConfigError
from kapelle.types import Message

HALF = {
    "players": 2,
    "colors": 2,
    "ranks": 3,
    "hand_size": 2,
    "max_information_tokens": 3,
    "max_life_tokens": 3,
}
BIG = {
    "players": 3,
    "colors": 5,
    "ranks": 5,
    "hand_size": 5,
    "max_information_tokens": 8,
    "max_life_tokens": 3,
}


@pytest.mark.parametrize("wording", ["short", "columns"])
@pytest.mark.parametrize("parameters", [HALF, BIG, {**HALF, "colors": 1}])
def test_it_makes_the_careful_players_moves_from_a_models_observation(
    parameters: dict[str, int], wording: Literal["short", "columns"]
) -> None:
    environment = OpenSpiel(
        game="hanabi", parameters=parameters, wording=wording, demonstrator=Demonstrator(slips=0.0)
    )
    rules, task, played = environment.conduct, environment.task("train", 0), 0
    for seed in range(4):
        state, draw = environment.loaded.new_initial_state(), random.Random(seed)
        while not state.is_terminal():
            if state.is_chance_node():
                state.apply_action(draw.choice(state.legal_actions()))
                continue
            seat = state.current_player()
            seen = [Message("user", show(state, seat, rules))]
            action = choose(state, seat, random.Random(0), bold=False)
            text = environment.script("first", task, seen, seed)
            legal = [state.action_to_string(seat, each) for each in state.legal_actions(seat)]
            if "(Discard 0)" in legal or "Reveal" not in state.action_to_string(
                seat, action
            ):  # nothing is drawn
                assert understand(state, seat, text, rules) == action, seen
            state.apply_action(action)
            played += 1
    assert played > 20


def test_slips_have_their_share() -> None:
    seen = [
        Message("user", "1/2 L3 I3 D6 FR0Y0 X RY123,RY123;R1=RY123,Y3=RY123 <P0 | P1 | 1R | 1Y | 11 | 13>")
    ]
    share = {}
    for slips in (0.0, 0.5, 1.0):
        environment = OpenSpiel(
            game="hanabi", parameters=HALF, wording="short", demonstrator=Demonstrator(slips=slips)
        )
        counts = Counter(
            environment.script("first", environment.task("train", 0), seen, seed) for seed in range(2000)
        )
        share[slips] = counts["11"] / 2000  # the rank of the card that fits
    assert share[0.0] == 1.0
    assert share[0.5] == pytest.approx(0.5 + 0.5 / 6, abs=0.04)
    assert share[1.0] == pytest.approx(1 / 6, abs=0.03)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"game": "kuhn_poker", "wording": "short"}, "kuhn_poker"),
        ({"game": "hanabi"}, "wording"),
        ({"game": "hanabi", "wording": "short", "list_moves": False}, "list_moves"),
    ],
)
def test_unfit_settings_are_errors(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenSpiel.model_validate({**given, "demonstrator": {"slips": 0.2}}).check(["first", "second"])
