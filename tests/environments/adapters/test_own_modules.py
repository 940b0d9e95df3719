"""Environments, tools and functions of the user's own, in files of the folder where kapelle runs."""

from __future__ import annotations

import subprocess
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
    """Return the name of a new module in the current folder, which imports another one there."""
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


@pytest.mark.parametrize("path", ["{0}", "./{0}.py", "{0}:Sticks", "./{0}.py:Sticks", "{0}:env"])
def test_a_game_of_pettingzoo_in_the_current_folder(module: str, path: str) -> None:
    pytest.importorskip("pettingzoo")
    world = _start({"name": "pettingzoo", "path": path.format(module), "rules": "none"}, ["a", "b"])
    assert world.movers() == ("a",)


@pytest.mark.parametrize(
    "given",
    [{"path": "{0}", "turns": "parallel"}, {"path": "{0}:Matching"}, {"path": "./{0}.py:parallel_env"}],
)
def test_a_class_of_pettingzoo_is_of_the_kind_that_it_is(module: str, given: dict[str, str]) -> None:
    pytest.importorskip("pettingzoo")
    own = {**given, "path": given["path"].format(module)}
    assert _start({"name": "pettingzoo", "rules": "none", **own}, ["a", "b"]).movers() == ("a", "b")


@pytest.mark.filterwarnings("ignore:.*Overriding environment")  # it is imported by its name too
@pytest.mark.parametrize("named", ["{0}:Grid", "./{0}.py:Grid", "{0}:Grid{1}-v0", "./{0}.py:Grid{1}-v0"])
def test_an_environment_of_gymnasium_in_the_current_folder(module: str, named: str) -> None:
    pytest.importorskip("gymnasium")
    named = named.format(module, module.rpartition("_")[2])
    world = _start({"name": "gymnasium", "id": named, "arguments": {"size": 4}}, ["a"])
    assert world.observe("a") == "0\nLegal actions: <0 | 1 | 2>"


@pytest.mark.parametrize("named", ["{0}:Guess", "./{0}.py:Guess"])
def test_a_game_of_textarena_in_the_current_folder(
    module: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "textarena", ModuleType("textarena"))
    world = _start({"name": "textarena", "id": named.format(module)}, ["a", "b"])
    assert world.observe("a") == "guess"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "pettingzoo", "path": "./{0}.py:Matchin"}, "Did you mean 'Matching'"),
        ({"name": "pettingzoo", "path": "./no_such.py"}, "there is no file './no_such.py'"),
        ({"name": "pettingzoo", "path": "{0}", "arguments": {"stick": 1}}, "cannot be made .* 'stick'"),
        ({"name": "pettingzoo", "path": "{0}:STICKS"}, "cannot be made"),
        ({"name": "pettingzoo", "path": "{0}:Grid"}, "has no `possible_agents`"),
        ({"name": "gymnasium", "id": "{0}:Guess"}, "has no `action_space`"),
        ({"name": "pettingzoo", "path": "broken.py"}, "cannot be imported: ValueError: no"),
        ({"name": "gymnasium", "id": "{0}:Grid", "arguments": {"siz": 1}}, "cannot be made .* 'siz'"),
        ({"name": "gymnasium", "id": "./no_such.py:Grid"}, "there is no file './no_such.py'"),
        ({"name": "gymnasium", "id": "{0}:Gird"}, "no environment is called `Gird`. Did you mean 'Grid'"),
        ({"name": "gymnasium", "id": "{0}"}, r"A class of yours is named as `own_games_\d+:Class`"),
        (
            {"name": "gymnasium", "id": "./{0}.py"},
            r"A class of yours is named as `\./own_games_\d+\.py:Class`",
        ),
        ({"name": "gymnasium", "id": "broken:Grid"}, "cannot be imported: ValueError: no"),
    ],
)
def test_a_mistake_in_it_is_named_without_blaming_a_package(
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


@pytest.mark.parametrize("name", ["{0}:Mine", "./{0}.py:Mine"])
def test_pieces_of_a_run_are_found_there_too(module: str, name: str) -> None:
    Path(f"{module}.py").write_text(f"import {module.replace('games', 'helpers')}\n\nclass Mine:\n    pass\n")
    assert workflow_class(name.format(module)).__name__ == "Mine"
    assert find_class("algorithm", name.format(module), {}).__name__ == "Mine"


@pytest.mark.slow
def test_the_command_finds_them(module: str) -> None:
    pytest.importorskip("pettingzoo")
    Path("recipe.yaml").write_text(
        "model: {path: embedded}\nteam: {agents: 2}\n"
        f"environment: {{name: pettingzoo, path: '{module}:Sticks'}}\nworkflow: {{name: play}}\nalgorithm: {{name: grpo}}\n"
        "training: {steps: 1, tasks_per_step: 1}\n"
    )
    done = subprocess.run(
        [str(Path(sys.executable).with_name("kapelle")), "train", "recipe.yaml", "--dry-run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
