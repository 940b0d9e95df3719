"""REINFORCE++'s whitening over the batch, with and without a baseline for each task, against GRPO's within groups."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of

GAME = {
    "name": "unequal",
    "seats": 1,
    "letters": 8,
    "right_letters": (1, 1, 1, 1),
    "anyway": (0.0, 0.3, 0.6, 0.9),
}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure direction and noise of the first update."""
    recipe = recipe_of(GAME, Arm({"group_size": 4, **algorithm}), rate, seed, training={"tasks_per_step": 8})
    found = anatomy(TableRun(recipe), 100)
    return Result({"noise": found.noise, "cosine": found.cosine})


def direction(arm: str) -> Any:
    """Return the cosine of an arm's expected update to the gradient."""

    def cosine(found: Found) -> float:
        return found[arm]["cosine"]

    return cosine


CLAIM = Claim(
    name="global_whitening",
    algorithms=("reinforce_plus_plus",),
    claim="Unlike division by each group's standard deviation, whitening over the batch keeps the gradient's direction; unequal tasks also need a baseline per task",
    source="REINFORCE++, 2501.03262, §3",
    setting=(
        "One agent, tasks of eight letters of which one is correct; the tasks also give constant rewards of 0, "
        "0.3, 0.6 and 0.9. A step has 4 episodes for each of 8 tasks. The expected first update is compared with "
        "the exact gradient. By simulation, the cosines are 1.00, 0.99 and 0.86, and the noise is 87, 49 and 73 "
        "tokens, for REINFORCE++, for REINFORCE++ with a baseline per task, and for GRPO; without any baseline "
        "the noise is 285."
    ),
    arms={
        "reinforce++": {"name": "reinforce_plus_plus"},
        "reinforce++, baseline: group": {"name": "reinforce_plus_plus", "baseline": "group"},
        "grpo": {"name": "grpo"},
        "none": {"name": "experiments.ablations:Plain"},
    },
    measure=measure,
    quick=2,
    predictions=(
        Prediction(
            "cosine of `reinforce++`'s expected update to the gradient",
            direction("reinforce++"),
            at_least=0.95,
        ),
        Prediction(
            "cosine of `reinforce++, baseline: group`'s expected update to the gradient",
            direction("reinforce++, baseline: group"),
            at_least=0.95,
        ),
        Prediction("cosine of `grpo`'s expected update to the gradient", direction("grpo"), at_most=0.92),
        Prediction(
            "`none` has at least 2.5 times the noise of `reinforce++`",
            lambda found: found["none"]["noise"] / found["reinforce++"]["noise"],
            at_least=2.5,
            turned=1.0,
        ),
        Prediction(
            "`reinforce++` has at least 1.4 times the noise of its form with a baseline per task",
            lambda found: found["reinforce++"]["noise"] / found["reinforce++, baseline: group"]["noise"],
            at_least=1.4,
            turned=1.0,
        ),
    ),
    plot="bars",
    plotted=("noise", "", "noise of the update, tokens"),
)
