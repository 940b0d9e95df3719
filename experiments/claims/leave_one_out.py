"""RLOO's leave-one-out baseline against one that counts the attempt itself, one divided by the spread, and none."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of

GAME = {
    "name": "unequal",
    "seats": 1,
    "letters": 4,
    "right_letters": (1, 1),
    "anyway": (0.5, 0.9),
}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure how many times the exact gradient of each task the expected update is, and its noise."""
    run = TableRun(recipe_of(GAME, Arm(algorithm), rate, seed, training={"tasks_per_step": 16}))
    found = anatomy(run, 60)
    large, small = found.multiples("agent_0", [run.row("1/1 0"), run.row("1/1 1")])
    return Result({"multiple": large, "small": small / large, "noise": found.noise})


CLAIM = Claim(
    name="leave_one_out",
    algorithms=("rloo",),
    claim="With the leave-one-out mean as baseline the expected update is the exact gradient, with less variance than without a baseline",
    source="Back to Basics (RLOO), 2402.14740, §2.3",
    setting="One agent, two tasks of four letters of which one is right, which pays 0.5 more than the 0.5 that the first pays for nothing; the second pays 0.9 for nothing and 0.1 more. 4 attempts at a task, 8 tasks of each kind in a "
    "step. The expected first update over the exact gradient, by task: by theory 1 for RLOO and 3/4 for GRPO without its scale; with it both tasks move alike, so that the second weighs 5 times "
    "the first. The noise without a baseline is 15 times RLOO's, by simulation.",
    arms={
        "rloo": {"name": "rloo", "group_size": 4},
        "grpo, scale: none": {"name": "grpo", "group_size": 4, "scale": "none"},
        "grpo": {"name": "grpo", "group_size": 4},
        "no baseline": {"name": "experiments.ablations:Plain", "group_size": 4},
    },
    measure=measure,
    quick=2,
    predictions=(
        Prediction(
            "`rloo` moves by 0.9 of the gradient", lambda found: found["rloo"]["multiple"], at_least=0.9
        ),
        Prediction("and by no more than 1.1 of it", lambda found: found["rloo"]["multiple"], at_most=1.1),
        Prediction(
            "`grpo, scale: none` by no more than 0.85 of it",
            lambda found: found["grpo, scale: none"]["multiple"],
            at_most=0.85,
        ),
        Prediction(
            "`rloo` weighs the task of the small stake at most 1.2 times",
            lambda found: found["rloo"]["small"],
            at_most=1.2,
        ),
        Prediction(
            "`grpo` weighs it 4 times", lambda found: found["grpo"]["small"], at_least=4.0, turned=1.0
        ),
        Prediction(
            "`no baseline` has 10 times the noise of `rloo`",
            lambda found: found["no baseline"]["noise"] / found["rloo"]["noise"],
            at_least=10.0,
            turned=1.0,
        ),
    ),
    remark="The noise of RLOO does not depend on what is paid for nothing; that without a baseline does: it is 3 times as much where the tasks pay 0 and 0.8 for nothing.",
    plot="bars",
    plotted=("small", "", "weight of the task with a fifth of the stake"),
)
