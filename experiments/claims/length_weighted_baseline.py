"""OPO's baseline, which weighs attempts by their length, against one that weighs them alike, or the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of

GAME = {"name": "essay", "seats": 1, "letters": 2, "longest": 4, "place": 1}
LOSS = {"aggregation": "sequence_sum", "constant": 2}


def start(seen: str) -> Mapping[str, float]:
    """Say `A` with chance 0.45, `B` with 0.05, and end with a half."""
    return {"A": 2.197, "B": 0.0, "": 2.303}


def measure(arm: tuple[dict[str, Any], int], seed: int, rate: float) -> Result:
    """Measure noise and direction of the first update from 64 attempts."""
    algorithm, size = arm
    settings = {**algorithm, "group_size": size, "loss": LOSS}
    recipe = recipe_of(GAME, Arm(settings), rate, seed, training={"tasks_per_step": 64 // size})
    found = anatomy(TableRun(recipe, start), 30)
    return Result({"noise": found.noise, "cosine": found.cosine})


def noisier(arm: str, by: float) -> Prediction:
    """Return the prediction that an arm's update has so many times OPO's noise."""
    return Prediction(
        f"`{arm}` has {by:g} times the noise of `opo @ 64`",
        lambda found: found[arm]["noise"] / found["opo @ 64"]["noise"],
        at_least=by,
        turned=1.0,
    )


OPO: dict[str, Any] = {"name": "opo"}
MEAN: dict[str, Any] = {"name": "grpo", "scale": "none"}

CLAIM = Claim(
    name="length_weighted_baseline",
    algorithms=("opo",),
    claim="If correct answers are long, a length-weighted baseline has less variance than the plain mean in large groups",
    source="On-Policy RL with Optimal Reward Baseline, 2505.23585, §3",
    setting=(
        "One agent writes texts of up to 4 letters and ends with probability 1/2 before each letter; a text is "
        "correct if its second letter is `A`, which is the case for most texts with a second letter. The measure "
        "is the noise of the first update from 8 groups of 8 or one group of 64. By simulation, the noise of the "
        "plain mean is 1.05 times that of OPO in groups of 8 and 1.22 times in one group of 64; there inverse "
        "weights give 1.56 times, and no baseline gives 1.92 times."
    ),
    arms={
        "opo @ 8": (OPO, 8),
        "opo @ 64": (OPO, 64),
        "plain mean @ 8": (MEAN, 8),
        "plain mean @ 64": (MEAN, 64),
        "short weigh more @ 64": ({"name": "experiments.ablations:ShortWeighMore"}, 64),
        "none @ 64": ({"name": "experiments.ablations:Plain"}, 64),
    },
    measure=measure,
    predictions=(
        noisier("plain mean @ 64", 1.1),
        noisier("short weigh more @ 64", 1.35),
        noisier("none @ 64", 1.5),
        Prediction(
            "in groups of 8, the plain mean has at most 1.12 times the noise of OPO",
            lambda found: found["plain mean @ 8"]["noise"] / found["opo @ 8"]["noise"],
            at_most=1.12,
        ),
        Prediction(
            "cosine of `opo @ 64`'s expected update to the gradient",
            lambda found: found["opo @ 64"]["cosine"],
            at_least=0.97,
        ),
    ),
    remark=(
        "The best baseline weighs an episode by the squared norm of its gradient. Length approximates this norm "
        "if all tokens are equally surprising. If long texts consist of likely letters, enumeration gives OPO as "
        "much noise as the plain mean, or slightly more. In a small group, the advantages of short and long "
        "episodes depend on few other episodes, which cancels the gain."
    ),
    plot="lines",
    plotted=("noise", "episodes per task", "noise of the update, tokens"),
)
