"""GRPO's group baseline against a batch's mean and against none."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of
from kapelle.environments.yardsticks import Unequal

GAME = {
    "name": "unequal",
    "seats": 1,
    "letters": 6,
    "right_letters": (1, 1, 1, 1),
    "anyway": (0.0, 0.3, 0.6, 0.9),
}
TOKENS = 8000


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let one agent learn four tasks that pay unequally for nothing."""
    run = TableRun(recipe_of(GAME, Arm(algorithm), rate, seed, training={"tasks_per_step": 4}))
    curve = learn(run, TOKENS, every=4)
    return Result(
        {"area": curve.area(TOKENS), "end": curve.end}, list(zip(curve.tokens, curve.values, strict=True))
    )


CLAIM = Claim(
    name="group_baseline",
    algorithms=("grpo",),
    claim="A baseline from the same task's other attempts beats one from the whole batch, and none",
    source="DeepSeekMath, 2402.03300, §4.1",
    setting="One agent, four tasks of six letters of which one is right; they pay 0, 0.3, 0.6 and 0.9 whatever is said. 8 attempts at each task in every step.",
    arms={
        "group": {"name": "grpo", "group_size": 8, "scale": "none"},
        "batch": {"name": "experiments.ablations:Plain", "group_size": 8, "baseline": "batch"},
        "none": {"name": "experiments.ablations:Plain", "group_size": 8},
    },
    measure=measure,
    rates=(0.5, 2.0, 8.0, 32.0),
    predictions=(
        better("group", "batch", 0.005),
        better("group", "none", 0.03),
    ),
    landmarks=Unequal.model_validate(GAME).landmarks,
    quick=5,
)
