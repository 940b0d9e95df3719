"""siiRL's workflow files have the same meaning here, or raise an error that names the unsupported part."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tests.workflows.stage import lines, play

from kapelle.environments.arithmetic import Arithmetic
from kapelle.errors import ConfigError
from kapelle.setup.recipe import lay_over
from kapelle.setup.team_builder import build_team
from kapelle.types import Task
from kapelle.workflows.dag import Dag
from kapelle.workflows.dag_file import is_workflow_file, read_workflow

PROCESS = "examples/experimental/marft/config/process.py"
SIIRL = f"""
dag_id: reason_then_act
description: two agents in siiRL's form
one: &one {{rollout.n: 1, rollout.tensor_model_parallel_size: 4, rollout.gpu_memory_utilization: 0.3}}
nodes:
  - node_id: rollout_reasoner
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    config: *one
    agent_group: 0
    dependencies: []
    agent_options:
      obs_with_env: true
      process_path: {PROCESS}
      pre_process_kwargs: {{pre_chat_template: "Reason about ${{prompt}}:"}}
      post_process_kwargs: {{post_chat_template: " reasoner: "}}
  - node_id: rollout_actor
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    agent_group: 1
    dependencies: [rollout_reasoner]
    agent_options:
      obs_with_env: true
      process_path: {PROCESS}
      pre_process_kwargs: {{pre_chat_template: "Act on ${{prompt}}:"}}
      env_path: [config/math_env.py:MathEnv]
  - {{node_id: reward, node_type: COMPUTE, node_role: REWARD, agent_group: 1, dependencies: [rollout_actor]}}
  - {{node_id: old_0, node_type: MODEL_TRAIN, node_role: ACTOR, only_forward_compute: true, agent_group: 0, dependencies: [reward]}}
  - {{node_id: ref_1, node_type: MODEL_TRAIN, node_role: REFERENCE, agent_group: 1, dependencies: [old_0]}}
  - node_id: value_1
    node_type: MODEL_TRAIN
    node_role: CRITIC
    agent_group: 1
    only_forward_compute: true
    dependencies: [ref_1]
    agent_options: {{share_instance: 0}}
  - {{node_id: advantage, node_type: COMPUTE, node_role: ADVANTAGE, agent_group: 1, dependencies: [value_1]}}
  - {{node_id: train_0, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 0, dependencies: [advantage], agent_options: {{train_cycle: 15}}}}
  - {{node_id: train_1, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 1, dependencies: [train_0], agent_options: {{train_cycle: 15}}}}
"""
BASE = {"environment": {"name": "arithmetic"}, "workflow": {"name": "solo"}, "algorithm": {"name": "marft"}}


def siirl() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(SIIRL)
    return values


def test_siirls_file_is_a_workflow_a_team_an_order_and_an_environment() -> None:
    assert is_workflow_file(siirl())
    read = read_workflow(siirl(), "marft.yaml")
    assert read.sections["team"] == {
        "agents": [{"name": "reasoner"}, {"name": "actor", "share_critic_with": "reasoner"}]
    }
    assert read.sections["algorithm"] == {"order": {"name": "alternate", "interval": 15}}
    assert read.sections["environment"] == {"name": "math"}
    assert [node["id"] for node in read.sections["workflow"]["nodes"]] == [
        "rollout_reasoner",
        "rollout_actor",
    ]
    assert set(read.set_aside) == {
        "config.rollout.n",
        "config.rollout.tensor_model_parallel_size",
        "config.rollout.gpu_memory_utilization",
    }


async def test_it_is_merged_into_a_recipe_and_runs() -> None:
    sections = {**read_workflow(siirl(), "marft.yaml").sections, "environment": {"name": "arithmetic"}}
    config = lay_over([("base", BASE), ("marft.yaml", sections)]).config
    team = build_team(config, config.algorithm.build())
    assert team.trained == ("reasoner", "actor")
    assert set(team.critic_of.values()) == {"critic:reasoner"}, "seat number 0 is a seat"
    assert isinstance(config.workflow, Dag)
    scripts = {"reasoner": lines("carry"), "actor": lines("132")}
    [episode] = await play(
        Arithmetic(), config.workflow, list(team.names), scripts, Task("t", "47+85", {"answer": 132})
    )
    assert [[(m.role, m.content) for m in turn.new_messages] for turn in episode.turns] == [
        [("system", ""), ("user", "Reason about 47+85:")],
        [("system", ""), ("user", "Act on 47+85 reasoner: carry:")],
    ]
    assert episode.rewards == {"actor": 1.0}


def test_an_agent_without_a_training_node_is_frozen() -> None:
    values = siirl()
    values["nodes"] = [node for node in values["nodes"] if node["node_id"] != "train_0"]
    values["nodes"][-1]["dependencies"] = ["advantage"]
    reasoner, actor = read_workflow(values, "it").sections["team"]["agents"]
    assert reasoner == {"name": "reasoner", "weights": "frozen"}
    assert "weights" not in actor


@pytest.mark.parametrize(("shared", "reward"), [(True, "mean"), (False, "last")])
def test_kapelle_s_own_form_needs_three_nodes(shared: bool, reward: str) -> None:
    text = f"""
    nodes:
      - {{id: plan, agent: planner, train_cycle: 2}}
      - {{id: code, agent: coder, dependencies: [plan], prompt: "${{plan.output}}", share_instance: planner, train_cycle: 2}}
      - {{id: check, agent: judge, dependencies: [code], only_forward_compute: true}}
    answer: code
    max_assistant_turns: 3
    use_all_traj: true
    rewards_with_env: true
    share_reward_in_agent: {str(shared).lower()}
    """
    sections = read_workflow(yaml.safe_load(text), "mine.yaml").sections
    assert sections == {
        "workflow": {
            "name": "dag",
            "nodes": [
                {"id": "plan", "agent": "planner"},
                {"id": "code", "agent": "coder", "dependencies": ["plan"], "prompt": "${plan.output}"},
                {"id": "check", "agent": "judge", "dependencies": ["code"]},
            ],
            "answer": "code",
            "max_assistant_turns": 3,
            "use_all_traj": True,
        },
        "team": {
            "agents": [
                {"name": "planner"},
                {"name": "coder", "share_critic_with": "planner"},
                {"name": "judge", "weights": "frozen"},
            ]
        },
        "algorithm": {"order": {"name": "alternate", "interval": 2}, "team_reward": reward},
    }
    assert lay_over([("base", BASE), ("mine.yaml", sections)]).config.team.agents


def test_settings_of_siirl_s_scripts_can_be_in_a_node_s_config() -> None:
    config = {"rollout.multi_turn.max_assistant_turns": 4, "algorithm.share_reward_in_agent": False}
    sections = read_workflow(changed("rollout_actor", config=config), "it").sections
    assert sections["workflow"]["max_assistant_turns"] == 4
    assert sections["algorithm"]["team_reward"] == "last"
    config["rollout.multi_turn.use_all_traj"] = False
    sections = read_workflow(changed("rollout_actor", config=config), "it").sections
    assert sections["workflow"]["use_all_traj"] is False


def test_a_number_of_samples_is_the_groups_size() -> None:
    values = changed("rollout_reasoner", config={"rollout.n": 8})
    assert read_workflow(values, "it").sections["algorithm"]["group_size"] == 8


def test_models_are_the_teams_or_the_agents_own() -> None:
    own = [{"model": "A", "train": "full"}, {"model": "B", "train": "full"}]
    for model, shared, expected in (("A", {"path": "A"}, [None, None]), ("B", None, own)):
        values = changed("rollout_reasoner", config={"model.path": "A"})
        next(n for n in values["nodes"] if n["node_id"] == "rollout_actor")["config"] = {"model.path": model}
        sections = read_workflow(values, "it").sections
        assert sections.get("model") == shared
        assert [agent.get("weights") for agent in sections["team"]["agents"]] == expected
    values = changed("rollout_reasoner", config={"model.path": "A"})
    values["nodes"][-1]["config"] = {"model.path": "B"}
    values["nodes"][-2]["config"] = {"model.path": "C"}
    with pytest.raises(ConfigError, match=r"`config.model.path: C` of node 'train_0'"):
        read_workflow(values, "it")


def changed(node: str, **keys: Any) -> dict[str, Any]:
    values = siirl()
    one = next(n for n in values["nodes"] if n["node_id"] == node)
    options = keys.pop("options", {})
    one.update(keys)
    one["agent_options"] = {**(one.get("agent_options") or {}), **options}
    return values


@pytest.mark.parametrize("key", ["model.path", "critic.model.path"])
def test_a_critics_own_model_is_that_of_all_critics(key: str) -> None:
    sections = read_workflow(changed("value_1", config={key: "Qwen/Qwen2.5-0.5B"}), "it").sections
    assert sections["team"]["critic_model"] == "Qwen/Qwen2.5-0.5B"
    assert "model" not in sections, "the agents' model stays"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"nodes": []}, "no list `nodes`"),
        ({"nodes": [3]}, "no list `nodes`"),
        ({**siirl(), "epochs": 3}, "`epochs`"),
        (
            changed("reward", node_role="DYNAMIC_SAMPLING"),
            "DYNAMIC_SAMPLING",
        ),
        (changed("reward", dependencies=["train_1"]), "cycle: "),
        (changed("reward", dependencies=["gone"]), "unknown node 'gone'"),
        (changed("reward", agent_group=3), "groups of it are 0, 1, 3"),
        (changed("reward", agent_group="x"), "agent_group 'x'"),
        (changed("reward", colour="red"), "node 'reward' of it .*`colour`"),
        (changed("reward", options={"trian_cycle": 1}), "Did you mean 'train_cycle'"),
        (changed("value_1", options={"train_cycle": 7}), "has `train_cycle` and the role CRITIC"),
        (changed("train_0", options={"train_cycle": 0}), "`train_cycle` is 0"),
        (changed("value_1", options={"share_instance": 5}), "share_instance: 5"),
        (changed("rollout_actor", config={"rollout.n": 8}), "rollout.n"),
        (changed("rollout_actor", config={"rollout.n": 0}), "`config.rollout.n: 0` of node"),
        (
            changed("rollout_actor", config={"actor.optim.lr": 1}),
            r"`config.actor.optim.lr: 1` of node 'rollout_actor'",
        ),
        (
            changed("rollout_actor", options={"env_path": ["e.py:MyEnv"]}),
            "env_path: e.py",
        ),
        (
            changed("rollout_reasoner", options={"env_path": ["mine:Env"]}),
            "sets two environments, math and mine:Env",
        ),
        ({**siirl(), "use_all_traj": "no"}, "true or false"),
        ({**siirl(), "share_reward_in_agent": 1}, "true or false"),
        ({**siirl(), "rewards_with_env": 0}, "true or false"),
        ({"nodes": [{"id": "a", "agent": "x", "agent_group": 0}]}, "Set one of them"),
        ({"nodes": [{"agent": "x"}]}, "has no `id`"),
        ({"nodes": [{"id": "a", "agent": "x", "promt": ""}]}, "Did you mean 'prompt'"),
    ],
)
def test_unsupported_files_raise_an_error_with_names(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_workflow(values, "it")
