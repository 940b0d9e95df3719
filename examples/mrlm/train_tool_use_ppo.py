"""An agent that may call a calculator: each call is a turn that the workflow answers, and only the final answer is rewarded.

python examples/mrlm/train_tool_use_ppo.py
"""

import json
import sys

import kapelle
from kapelle.algorithms import PPO
from kapelle.environments import Arithmetic, Tools
from kapelle.environments.tools.calculator import Calculator
from kapelle.workflows import ToolUse


def main(steps: int = 4) -> None:
    """Show the format of a call, then train."""
    trainer = kapelle.Trainer(
        model={"embedded": {"hidden": 64, "layers": 2, "intermediate": 128, "context": 2048}},
        team={"agents": 1, "sampling": {"max_tokens": 4}},
        environment=Tools(
            questions=Arithmetic(digits=1),
            tools=(Calculator(),),
            max_turns=2,
        ),
        workflow=ToolUse(),
        algorithm=PPO(),
        warmup={"steps": 20 * steps, "demonstrations": 100, "batch": 8},
        optimizer={"lr": 1e-3},
        training={"tasks_per_step": 4},
    )
    call = {"name": "calculator", "arguments": {"expression": "4+5"}}
    print("a call is written", json.dumps(call))
    with trainer:
        for step in trainer.steps(steps):
            turns = step.metrics["turns/agent_0"]
            print(f"step {step.number:3d}  success {step.metrics['success']:.2f}  turns {turns:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
