"""DPO: pairs of answers in which one answer was preferred, without any sampling.

python examples/mrlm/train_dpo_preferences.py
"""

import json
import sys
import tempfile
from pathlib import Path

import kapelle
from kapelle.algorithms import DPO
from kapelle.environments import Preferences
from kapelle.workflows import Solo

SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}
"""A model that a laptop trains in seconds; replace it with `"Qwen/Qwen3-0.6B"` and change the learning rate."""

TOPICS = (
    "rain",
    "bread",
    "trains",
    "chess",
    "moss",
    "tides",
    "bees",
    "glass",
    "maps",
    "salt",
    "clocks",
    "wool",
)


def pair(topic: str) -> str:
    """Return a row in which the polite answer was chosen."""
    row = {"prompt": f"Tell me of {topic}.", "chosen": f"Gladly: {topic}.", "rejected": f"No {topic}!"}
    return json.dumps(row) + "\n"


def main(steps: int = 10) -> float:
    """Train, and return the share of pairs whose chosen answer has become more likely than the other."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.jsonl").write_text("".join(map(pair, TOPICS[:8])))
        (Path(folder) / "test.jsonl").write_text("".join(map(pair, TOPICS[8:])))
        trainer = kapelle.Trainer(
            model=SMALL,
            team={"agents": 1, "sampling": {"max_tokens": 24}},
            environment=Preferences(path=folder),
            workflow=Solo(),
            algorithm=DPO(beta=0.1, data="recorded"),
            optimizer={"lr": 3e-3},
            training={"tasks_per_step": 8},
        )
        right = 0.0
        with trainer:
            for step in trainer.steps(steps):
                right = step.metrics["preference_accuracy/agent_0"]
                print(
                    f"step {step.number:3d}  margin {step.metrics['preference_margin/agent_0']:+.3f}  right {right:.0%}"
                )
    return right


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
