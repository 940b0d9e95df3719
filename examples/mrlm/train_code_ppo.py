"""Programs that are executed: an agent writes Python, and hidden tests in a sandbox determine the share that is correct.

python examples/mrlm/train_code_ppo.py
"""

import json
import sys
import tempfile
from pathlib import Path

import kapelle
from kapelle.algorithms import PPO
from kapelle.environments import Code
from kapelle.workflows import Solo

PROBLEMS = [("doubles", "2 * x"), ("negates", "-x"), ("squares", "x * x"), ("halves", "x / 2")]
SMALL = {"embedded": {"hidden": 64, "layers": 2, "intermediate": 128}}


def row(number: int, name: str, formula: str) -> str:
    """Return a problem in the form of MBPP's rows: the first test is shown to the agent, and the others are hidden."""
    function = f"def f(x):\n    return {formula}"
    tests = [f"assert f({x}) == {eval(formula, {}, {'x': x})}" for x in (1, 4, -6)]  # noqa: S307 - our own formulas
    asked = {
        "task_id": number,
        "text": f"f {name} x",
        "code": function,
        "test_setup_code": "",
        "test_list": tests,
    }
    return json.dumps(asked) + "\n"


def main(steps: int = 4) -> None:
    """Show the solutions in a warm-up, then train with rewards from the tests."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [row(601 + k, *problem) for k, problem in enumerate(PROBLEMS)]
        (Path(folder) / "train.jsonl").write_text("".join(rows[:3]))
        (Path(folder) / "test.jsonl").write_text(rows[3])
        trainer = kapelle.Trainer(
            model=SMALL,
            team={"agents": 1, "sampling": {"max_tokens": 48}},
            environment=Code(path=folder, partial_credit=True),
            workflow=Solo(),
            algorithm=PPO(),
            warmup={"steps": 30 * steps, "demonstrations": 3, "batch": 6, "lr": 1e-2},
            optimizer={"lr": 1e-3},
            training={"tasks_per_step": 3},
        )
        with trainer:
            wrote = ""
            for step in trainer.steps(steps):
                print(f"step {step.number:3d}  tests passed {step.metrics['success']:.0%}")
                wrote = step.groups[0].episodes[0].turns[-1].text
            print("it wrote:", wrote.replace("\n", " | "))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
