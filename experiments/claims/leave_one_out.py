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
    claim="With the leave-one-out mean as the baseline, the expected update is the exact gradient and has less variance than without a baseline",
    source="Back to Basics (RLOO), 2402.14740, §2.3",
    setting=(
        "One agent, two tasks of four letters of which one is correct. The first task gives a constant reward of "
        "0.5 and adds 0.5 for the correct letter; the second gives 0.9 and adds 0.1. A step has 4 episodes per "
        "task and 8 tasks of each kind. The expected first update is divided by the exact gradient, for each "
        "task: in theory the ratio is 1 for RLOO and 3/4 for GRPO without its scale. With GRPO's scale both tasks "
        "have equal updates, so the second has 5 times the weight of the first. By simulation, the noise without "
        "a baseline is 15 times that of RLOO."
    ),
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
            "`rloo`'s update is at least 0.9 times the gradient",
            lambda found: found["rloo"]["multiple"],
            at_least=0.9,
        ),
        Prediction(
            "`rloo`'s update is at most 1.1 times the gradient",
            lambda found: found["rloo"]["multiple"],
            at_most=1.1,
        ),
        Prediction(
            "`grpo, scale: none`'s update is at most 0.85 times the gradient",
            lambda found: found["grpo, scale: none"]["multiple"],
            at_most=0.85,
        ),
        Prediction(
            "`rloo` gives the task with the smaller reward at most 1.2 times the weight",
            lambda found: found["rloo"]["small"],
            at_most=1.2,
        ),
        Prediction(
            "`grpo` gives the task with the smaller reward at least 4 times the weight",
            lambda found: found["grpo"]["small"],
            at_least=4.0,
            turned=1.0,
        ),
        Prediction(
            "`no baseline` has at least 10 times the noise of `rloo`",
            lambda found: found["no baseline"]["noise"] / found["rloo"]["noise"],
            at_least=10.0,
            turned=1.0,
        ),
    ),
    remark=(
        "The noise of RLOO does not depend on the constant reward, but the noise without a baseline does: it is 3 "
        "times as large if the constant rewards are 0 and 0.8."
    ),
    plot="bars",
    plotted=("small", "", "weight of the task with a fifth of the reward"),
)
