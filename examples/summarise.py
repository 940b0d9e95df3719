"""Summaries of your own rows: ROUGE-L measures their similarity to a reference, and a word limit bounds their length.

python examples/summarise.py [STEPS]
"""

import json
import sys
import tempfile
from pathlib import Path

import kapelle
from kapelle.environments import Summarisation
from kapelle.environments.grading.text.overlap import Length
from kapelle.workflows import Solo

WHO, WHERE = ("ann", "bo", "cy", "di"), ("home", "town", "work")
SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}


def main(steps: int = 4) -> None:
    """Show summaries in a warm-up, then train with similarity as the reward."""
    rows = [
        {"document": f"{who} was in the {place} all day, and it rained.", "summary": f"{who} in {place}"}
        for who in WHO
        for place in WHERE
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name, part in (("train", rows[:-3]), ("test", rows[-3:])):
            (Path(folder) / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        trainer = kapelle.Trainer(
            model=SMALL,
            team={"agents": 1, "sampling": {"max_tokens": 16}},
            environment=Summarisation(path=folder, length=Length(most=3), prompt="{text}"),
            workflow=Solo(),
            algorithm={"name": "a2c", "group_size": 4},
            warmup={"steps": 6 * steps, "demonstrations": 9, "batch": 9, "lr": 1e-2},
            optimizer={"lr": 1e-3},
            training={"tasks_per_step": 3},
        )
        with trainer:
            for step in trainer.steps(steps):
                said = step.groups[0].episodes[0]
                print(
                    f"step {step.number:3d}  ROUGE-L {step.metrics['success']:.2f}  {said.turns[-1].text!r}"
                )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
