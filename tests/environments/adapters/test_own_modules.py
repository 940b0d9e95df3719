"""The user's own environments in files of the current folder."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kapelle.environment import environment_class
from kapelle.errors import ConfigError
from kapelle.runtime.plugins import find_class
from kapelle.workflow import workflow_class

HELPERS = "STICKS = 2\n"
GAMES = """
from {helpers} import STICKS
import gymnasium
from gymnasium.spaces import Discrete
from pettingzoo import AECEnv, ParallelEnv

class Grid(gymnasium.Env):
    action_space = observation_space = Discrete(3)

    def __init__(self, size=3):
        self.size = size + 0

    def reset(self, seed=None, options=None):
        return 0, {{}}

    def step(self, action):
        return 1, 1.0, True, False, {{}}

gymnasium.register(id="Grid{number}-v0", entry_point="{module}:Grid")

class Sticks(AECEnv):
    metadata = {{"name": "sticks"}}

    def __init__(self, sticks=STICKS):
        self.possible_agents = ["x", "y"]

    def action_space(self, agent):
        return Discrete(2)

    def observe(self, agent):
        return "sticks"

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.agent_selection = "x"
        self.terminations = self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {{agent: {{}} for agent in self.agents}}

    def close(self):
        pass

class Matching(ParallelEnv):
    metadata = {{"name": "matching"}}
    possible_agents = ["x", "y"]

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, "choose"), {{agent: {{}} for agent in self.agents}}

    def close(self):
        pass

env, parallel_env = Sticks, Matching

class Guess:
    def reset(self, num_players, seed):
        pass

    def get_observation(self):
        return 0, "guess"
"""
_numbers = iter(range(1000))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a new module in the current folder; it imports another one there."""
    number = next(_numbers)
    name, helpers = f"own_games_{number}", f"own_helpers_{number}"
    (tmp_path / f"{helpers}.py").write_text(HELPERS)
    (tmp_path / f"{name}.py").write_text(GAMES.format(helpers=helpers, module=name, number=number))
    monkeypatch.chdir(tmp_path)
    return name


def _start(settings: dict[str, Any], agents: list[str]) -> Any:
    kind: Any = environment_class(settings["name"])
    environment = kind.model_validate(settings)
    environment.check(agents)
    return environment.start(environment.task("train", 0), agents, 0)


@pytest.mark.parametrize("path", ["{0}", "./{0}.py:Sticks"])
def test_a_game_of_pettingzoo_in_the_current_folder(module: str, path: str) -> None:
    pytest.importorskip("pettingzoo")
    world = _start({"name": "pettingzoo", "path": path.format(module), "rules": "none"}, ["a", "b"])
    assert world.movers() == ("a",)


@pytest.mark.parametrize(
    "given",
    [{"path": "{0}", "turns": "parallel"}, {"path": "{0}:Matching"}],
)
def test_the_class_of_a_game_decides_the_order_of_moves(module: str, given: dict[str, str]) -> None:
    pytest.importorskip("pettingzoo")
    own = {**given, "path": given["path"].format(module)}
    assert _start({"name": "pettingzoo", "rules": "none", **own}, ["a", "b"]).movers() == ("a", "b")


@pytest.mark.filterwarnings("ignore:.*Overriding environment")  # it is imported by its name too
@pytest.mark.parametrize("named", ["./{0}.py:Grid", "{0}:Grid{1}-v0"])
def test_an_environment_of_gymnasium_in_the_current_folder(module: str, named: str) -> None:
    pytest.importorskip("gymnasium")
    named = named.format(module, module.rpartition("_")[2])
    world = _start({"name": "gymnasium", "id": named, "arguments": {"size": 4}}, ["a"])
    assert world.observe("a") == "0\nLegal actions: <0 | 1 | 2>"


def test_a_game_of_textarena_in_the_current_folder(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", ModuleType("textarena"))
    world = _start({"name": "textarena", "id": f"./{module}.py:Guess"}, ["a", "b"])
    assert world.observe("a") == "guess"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "pettingzoo", "path": "./{0}.py:Matchin"}, "Did you mean 'Matching'"),
        ({"name": "pettingzoo", "path": "./no_such.py"}, "no_such.py"),
        ({"name": "pettingzoo", "path": "{0}", "arguments": {"stick": 1}}, "cannot be created .* 'stick'"),
        ({"name": "pettingzoo", "path": "{0}:Grid"}, "has no `possible_agents`"),
        ({"name": "gymnasium", "id": "{0}:Guess"}, "has no `action_space`"),
        ({"name": "pettingzoo", "path": "broken.py"}, "ValueError: no"),
        ({"name": "gymnasium", "id": "{0}:Grid", "arguments": {"siz": 1}}, "cannot be created .* 'siz'"),
        ({"name": "gymnasium", "id": "{0}:Gird"}, "Did you mean 'Grid'"),
        ({"name": "gymnasium", "id": "{0}"}, "module:Class"),
    ],
)
def test_a_mistake_is_named_without_blaming_a_package(
    module: str, settings: dict[str, Any], message: str
) -> None:
    pytest.importorskip("pettingzoo")
    Path("broken.py").write_text("raise ValueError('no')\n")
    settings = {
        key: value.format(module) if isinstance(value, str) else value for key, value in settings.items()
    }
    with pytest.raises(ConfigError, match=message) as raised:
        _start(settings, ["a", "b"] if settings["name"] == "pettingzoo" else ["a"])
    assert "kapelle[games]" not in str(raised.value)


def test_other_classes_are_found_there_too(module: str) -> None:
    Path(f"{module}.py").write_text(f"import {module.replace('games', 'helpers')}\n\nclass Mine:\n    pass\n")
    assert workflow_class(f"{module}:Mine").__name__ == "Mine"
    assert find_class("algorithm", f"./{module}.py:Mine", {}).__name__ == "Mine"
