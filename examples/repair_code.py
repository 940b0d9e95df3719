"""A program that fails, the message of its visible test, and a second answer: the environment `code` with a scripted agent.

    python examples/repair_code.py

Replace the script with a model and add an algorithm to train an agent that repairs code.
"""

import asyncio
import json
import tempfile
from pathlib import Path

from kapelle.engines.rollout.scripted import ScriptedEngine
from kapelle.environments import Code
from kapelle.rollout.episodes import rollout
from kapelle.rollout.setup import RolloutSetup
from kapelle.team import Agent, Policy, Team
from kapelle.types import Episode
from kapelle.workflows import Parallel

# Two problems in the form of MBPP's rows: one for training and one for testing. The first assert is shown to
# the agent; the others are hidden.
PROBLEM = {
    "task_id": 601,
    "text": "Write a function that returns the largest of three numbers.",
    "code": "def largest(a, b, c):\n    return max(a, b, c)",
    "test_setup_code": "",
    "test_list": [
        "assert largest(1, 2, 3) == 3",
        "assert largest(9, 2, 3) == 9",
        "assert largest(-5, -4, -6) == -4",
    ],
}
HELD_OUT = {**PROBLEM, "task_id": 602, "text": "Return the largest of three numbers."}

ATTEMPTS = (
    "```python\ndef largest(a, b, c):\n    return c\n```",
    "```python\ndef largest(a, b, c):\n    return max(a, b, c)\n```",
)


def team() -> Team:
    return Team((Agent("coder"),), {"coder": Policy("coder", base="", trained=False)}, {"coder": "coder"})


async def repair(folder: Path) -> Episode:
    (folder / "train.jsonl").write_text(json.dumps(PROBLEM) + "\n")
    (folder / "test.jsonl").write_text(json.dumps(HELD_OUT) + "\n")
    environment = Code(path=str(folder), max_attempts=2)
    environment.check(["coder"])  # reads the rows, and raises an error without a sandbox
    engine = ScriptedEngine({"coder": lambda request: ATTEMPTS[len(request.messages) // 2]})
    setup = RolloutSetup(team(), environment, Parallel(), engine)
    [group] = await rollout(setup, [environment.task("train", 0)], samples=1, seed=0)
    return group.episodes[0]


def main() -> float:
    with tempfile.TemporaryDirectory() as folder:
        episode = asyncio.run(repair(Path(folder)))
    for turn in episode.turns:
        print(f"--- {turn.agent} reads\n{turn.new_messages[0].content}\n--- {turn.agent} says\n{turn.text}\n")
    reward = episode.rewards["coder"]
    print(f"reward {reward}, tests {episode.info['tests']['coder']}")
    return reward


if __name__ == "__main__":
    main()
