"""Train two agents from Python: build the parts yourself, and write your own loop.

python examples/train_a_team.py            # about a minute
"""

import sys

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import Matrix
from kapelle.workflows import Parallel

PAYOFFS = {"AA": 1.0, "AB": 0.0, "BA": 0.0, "BB": 0.4}
"""The reward of each pair of moves; the agents must find it out, because `rules: none` does not explain the game."""


def main(steps: int = 20) -> float:
    """Train two agents, each with its own adapter, to find the best pair of moves in a one-shot game."""
    trainer = kapelle.Trainer(
        team={"agents": 2, "sharing": "lora", "sampling": {"max_tokens": 2}},
        environment=Matrix(game="custom", payoffs=PAYOFFS, rules="none"),
        workflow=Parallel(),
        algorithm=GRPO(group_size=16),
        warmup={"steps": 30, "demonstrations": 200, "lr": 1e-2},
        optimizer={"lr": 1e-3},
        training={"tasks_per_step": 4},
        evaluation={"problems": 1},
    )
    with trainer:
        for step in trainer.steps(steps):
            print(f"step {step.number:3d}  reward {step.metrics['return/agent_0']:+.2f}")
        episode = trainer.evaluate().groups[0].episodes[0]
        print("played:", {turn.agent: turn.text for turn in episode.turns}, "success:", episode.success)
    return episode.success or 0.0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
