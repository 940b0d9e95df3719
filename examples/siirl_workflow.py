"""A workflow file in siiRL's form that overrides a recipe: which agents act, which are trained, and whose critic is shared.

python examples/siirl_workflow.py
"""

import sys

import yaml

import kapelle
from kapelle.setup.recipe import lay_over
from kapelle.workflows import Dag
from kapelle.workflows.dag_file import read_workflow

WORKFLOW = """
nodes:
  - node_id: rollout_reasoner
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    agent_group: 0
    agent_options:
      obs_with_env: true
      process_path: examples/experimental/marft/config/process.py
      pre_process_kwargs: {pre_chat_template: "${prompt}"}
      post_process_kwargs: {post_chat_template: " "}
  - node_id: rollout_actor
    node_type: MODEL_INFERENCE
    node_role: ROLLOUT
    agent_group: 1
    dependencies: [rollout_reasoner]
    agent_options: {obs_with_env: true, pre_process_kwargs: {}}
  - {node_id: critic_1, node_type: MODEL_TRAIN, node_role: CRITIC, agent_group: 1, agent_options: {share_instance: 0}}
  - {node_id: train_0, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 0, agent_options: {train_cycle: 2}}
  - {node_id: train_1, node_type: MODEL_TRAIN, node_role: ACTOR, agent_group: 1, agent_options: {train_cycle: 2}}
share_reward_in_agent: true
"""
RECIPE = {
    "team": {"sampling": {"max_tokens": 6}},
    "environment": {"name": "arithmetic", "digits": 1},
    "workflow": {"name": "chain"},
    "algorithm": {"name": "marft"},
    "training": {"tasks_per_step": 8},
}


def main(steps: int = 4) -> None:
    """Read the file, draw it, and train with it."""
    read = read_workflow(yaml.safe_load(WORKFLOW), "workflow.yaml")
    print(Dag(**read.sections["workflow"]).mermaid(["reasoner", "actor"]))
    config = lay_over([("recipe", RECIPE), ("workflow.yaml", read.sections)]).config
    with kapelle.Trainer(config) as trainer:
        for step in trainer.steps(steps):
            trained = [name for name in ("reasoner", "actor") if f"grad_norm/{name}" in step.metrics]
            print(f"step {step.number}  trains {', '.join(trained)}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
