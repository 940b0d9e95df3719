"""Your own environment: tasks, and an episode state for one episode.

python examples/own_environment.py
kapelle train own.yaml          # with  environment: {name: "own_environment:Parity"}  on the Python path
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import BaseEnvironment, BaseState
from kapelle.types import Split
from kapelle.workflows import Solo


class Parity(BaseEnvironment, kapelle.Answerable):
    """Reads bits and expects `e` or `o`. Test problems have a different length from training problems."""

    name: Literal["own_environment:Parity"] = "own_environment:Parity"
    bits: int = 3

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": f"{self.bits} bits", "test": f"{self.bits + 1} bits"}

    def size(self, split: Split) -> int:
        return 1 << (self.bits + (split == "test"))

    def task(self, split: Split, index: int) -> kapelle.Task:
        bits = format(index, f"0{self.bits + (split == 'test')}b")
        return kapelle.Task(f"{split}-{bits}", bits, {"answer": "eo"[bits.count("1") % 2]})

    def start(self, task: kapelle.Task, agents: Sequence[str], seed: int) -> "ParityState":
        return ParityState(task, agents)

    def extract(self, text: str) -> str | None:
        return text.strip()[:1] or None


class ParityState(BaseState):
    """One question: is the number of ones even or odd?"""

    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        right = self.task.data["answer"]
        self.rewards = {agent: float(text.strip()[:1] == right) for agent, text in actions.items()}
        self.success, self.over = max(self.rewards.values()), True
        return {}


def main(steps: int = 20) -> None:
    """Train one agent on this environment."""
    trainer = kapelle.Trainer(
        team={"agents": 1, "sampling": {"max_tokens": 2}},
        environment=Parity(),
        workflow=Solo(),
        algorithm=GRPO(group_size=16),
        optimizer={"lr": 3e-3},
        training={"tasks_per_step": 8},
    )
    with trainer:
        for step in trainer.steps(steps):
            print(f"step {step.number:3d}  reward {step.metrics['return/agent_0']:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
