"""Settings that fit no game or team are errors before anything loads."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("pyspiel")

from kapelle.environments.openspiel.environment import OpenSpiel
from kapelle.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "agents", "message"),
    [
        ({"game": "kuhn_pokr"}, 2, "Did you mean 'kuhn_poker'"),
        ({"game": "kuhn_poker(players=2"}, 2, "cannot be read"),
        ({"parameters": {"player": 3}}, 2, "Did you mean 'players'"),
        ({"parameters": {"players": 99}}, 2, "cannot load"),
        ({"game": "mfg_garnet"}, 2, "mean-field"),
        ({}, 3, "Set `team.agents` to 2"),
        ({"parameters": {"players": 3}}, 2, "Set `team.agents` to 3"),
        ({}, 1, "same reward"),
        ({"game": "matrix_pd"}, 1, "one move at a time"),
        ({"opponents": {3: "random"}}, 2, "player 3"),
        ({"opponents": {1: "random", 2: "random"}}, 1, "Set `team.agents` to 1"),
        ({"opponents": {2: "mcts"}}, 1, "mcts"),
        ({"game": "connect_four", "opponents": {2: "cfr"}}, 1, "more than 500000 nodes"),
        ({"game": "hanabi_small", "opponents": {2: "cfr"}}, 1, "needs information states"),
        ({"game": "tiny_hanabi", "opponents": {2: "nash"}}, 1, "zero-sum"),
        ({"game": "negotiation", "view": "information"}, 2, "no information states"),
        ({"game": "liars_dice", "view": "observation"}, 2, "no observations"),
    ],
)
def test_unfit_settings_are_errors(settings: Mapping[str, Any], agents: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OpenSpiel.model_validate(settings).check([f"p{k}" for k in range(agents)])


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    with pytest.raises(ConfigError, match=r"pip install 'kapelle\[games\]'"):
        OpenSpiel().check(["a", "b"])
