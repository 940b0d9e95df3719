"""Graphs of several turns: the environment responds to each until the answer is correct or the turns are used up."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.environments.code.test_environment import DOUBLE, OTHER, fenced, folder
from tests.workflows.stage import play, transcript

from kapelle.engines.rollout.protocol import Request
from kapelle.environment import Environment, environment_class
from kapelle.environments.matrix import Matrix
from kapelle.environments.sandbox.bubblewrap import Bubblewrap
from kapelle.errors import ConfigError
from kapelle.setup.recipe import load_recipe
from kapelle.team import Agent
from kapelle.types import Episode
from kapelle.workflows.dag import Dag, Node

FILE = """
nodes:
  - node_id: rollout_reasoner
    node_role: ROLLOUT
    agent_group: 0
    agent_options: {obs_with_env: true, pre_process_kwargs: {}}
  - node_id: rollout_actor
    node_role: ROLLOUT
    agent_group: 1
    dependencies: [rollout_reasoner]
    agent_options: {obs_with_env: true, env_path: [config/math_env.py:MathEnv]}
  - {node_id: train_0, node_role: ACTOR, agent_group: 0, agent_options: {train_cycle: 1}}
  - {node_id: train_1, node_role: ACTOR, agent_group: 1, agent_options: {train_cycle: 1}}
max_assistant_turns: 3
"""


def in_turn(*texts: str) -> Any:
    """Say these texts one after another, whatever is read."""
    left = list(texts)

    def say(request: Request) -> str:
        return left.pop(0)

    return say


def written(tmp_path: Path, file: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """Write a recipe and a workflow file and return their paths."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"workflow": {"name": "chain"}, **recipe}))
    (tmp_path / "workflow.yaml").write_text(yaml.safe_dump(file))
    return [str(tmp_path / "recipe.yaml"), str(tmp_path / "workflow.yaml")]


def sums(tmp_path: Path) -> dict[str, Any]:
    """Settings of `math` over two questions."""
    for name, question, answer in (("train", "What is 47 + 85?", "132"), ("test", "What is 1 + 1?", "2")):
        (tmp_path / f"{name}.jsonl").write_text(
            json.dumps({"question": question, "answer": f"#### {answer}"})
        )
    return {"name": "math", "path": str(tmp_path)}


async def played(
    tmp_path: Path, file: Mapping[str, Any], environment: Mapping[str, Any], scripts: Mapping[str, Any]
) -> Episode:
    """Lay a file over a recipe and play the first training task."""
    recipe = {"environment": environment, "algorithm": {"name": "marft"}}
    name, over = written(tmp_path, file, recipe)
    config = load_recipe(name, [over]).config
    world: Any = config.environment
    workflow: Any = config.workflow
    world.check(tuple(scripts))
    [episode] = await play(world, workflow, list(scripts), scripts, world.task("train", 0))
    return episode


async def test_three_turns_of_mathematics_in_siirls_form(tmp_path: Path) -> None:
    scripts = {
        "reasoner": in_turn("add", "carry", "never"),
        "actor": in_turn("#### 122", "#### 132", "#### 0"),
    }
    episode = await played(tmp_path, yaml.safe_load(FILE), sums(tmp_path), scripts)
    asked = "What is 47 + 85?"
    first = f"{asked}\n\nrollout_reasoner: add"
    second = f"{first}\n\nrollout_actor: #### 122\n\nThis answer is wrong."
    assert transcript(episode) == [
        f"0 seen=0 {asked} -> reasoner: add",
        f"1 seen=1 {first} -> actor: #### 122",
        f"2 seen=2 {second} -> reasoner: carry",
        f"3 seen=3 {second}\n\nrollout_reasoner: carry -> actor: #### 132",
    ]
    assert episode.rewards == {"actor": 1.0}, "the last answer is paid, once"
    assert [turn.reward for turn in episode.turns] == [0.0] * 4
    assert (episode.success, episode.truncated, episode.info["answers_given"]) == (1.0, False, 2)


async def test_three_turns_of_code_show_the_shown_test_and_one_bit_of_the_others(
    sandbox: Bubblewrap, tmp_path: Path
) -> None:
    file = yaml.safe_load(FILE.replace("math_env.py:MathEnv", "code_env.py:CodeEnv"))
    rows = folder(tmp_path, DOUBLE, OTHER)
    programs = (
        "def double(x):\n    return 0",
        "def double(x):\n    return x * x",
        "def double(x):\n    return 2 * x",
    )
    scripts = {"reasoner": lambda _: "plan", "actor": in_turn(*map(fenced, programs))}
    recipe = {"name": "code", "path": rows, "published_split": False}
    episode = await played(tmp_path, file, recipe, scripts)
    assert episode.error is None
    assert len(episode.turns) == 6
    assert (episode.rewards, episode.success) == ({"actor": 1.0}, 1.0)
    second, third = (episode.turns[k].new_messages[-1].content for k in (2, 4))
    assert "Attempt 1 of 3 failed.\n\nassert double(2) == 4\n# failed" in second
    assert "Attempt 2 of 3 failed.\n\nassert double(2) == 4\n# passed" in third
    assert third.endswith("closes with ```.")
    assert "Tests that are not shown to you: not all passed." in third
    assert not any(hidden in third for hidden in ("double(3)", "double(-7)", "-14"))


TWO = Dag(
    nodes=(
        Node(id="x", agent="a"),
        Node(id="y", agent="b", dependencies=("x",), prompt="${question}|${x.output}"),
    ),
    max_assistant_turns=3,
)
SUMS: dict[str, Any] = {"name": "arithmetic"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("arithmetic", {}),
        ("algebra", {}),
        ("word_problems", {}),
        ("multi_step", {}),
        (
            "mixture",
            {"parts": {"sums": {"environment": SUMS}, "chains": {"environment": {"name": "multi_step"}}}},
        ),
        ("tools", {"questions": SUMS}),
        ("tools", {"questions": {"name": "algebra"}}),
    ],
)
async def test_every_question_environment_continues_after_an_incorrect_answer(
    name: str, settings: dict[str, Any]
) -> None:
    environment: Any = environment_class(name)(**settings)
    task = environment.task("train", 3)
    gold = environment.script("solver", task, (), 0)
    scripts = {"a": lambda _: "?", "b": in_turn("no idea at all", gold, "too late")}
    [episode] = await play(environment, TWO, ["a", "b"], scripts, task)
    assert episode.error is None
    assert [turn.agent for turn in episode.turns] == ["a", "b", "a", "b"]
    assert (episode.rewards, episode.success) == ({"b": 1.0}, 1.0)
    asked = task.question
    assert episode.turns[2].new_messages[0].content.endswith("y: no idea at all\n\nThis answer is wrong.")
    assert episode.turns[3].new_messages[0].content == f"{asked}\n\nThis answer is wrong.|?"


def test_environments_without_responses_raise_an_error(tmp_path: Path) -> None:
    agents = [Agent("a"), Agent("b")]
    (tmp_path / "rows.jsonl").write_text("")
    for name in ("labelled", "preferences", "trajectories"):
        environment: Environment = environment_class(name)(path=str(tmp_path / "rows.jsonl"))
        with pytest.raises(ConfigError, match=rf"`{name}` |{name}"):
            TWO.check(agents, environment)
    with pytest.raises(ConfigError, match="`matrix` is a game of moves"):
        TWO.check(agents, Matrix())
