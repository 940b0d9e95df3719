"""Sets by turn or by state against whole attempts, where a game pays as it goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, noise, recipe_of

ROUNDS = (1, 2, 8)
SETS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"name": "grpo"},
    "at_grpo": {"name": "at_grpo"},
    "magrpo": {"name": "magrpo"},
    "gigpo": {"name": "gigpo"},
}


def measure(arm: tuple[int, Mapping[str, Any]], seed: int, rate: float) -> Result:
    """Measure the noise of the first update."""
    rounds, algorithm = arm
    game = {"name": "long_game", "seats": 1, "rounds": rounds}
    return Result({"tokens": noise(TableRun(recipe_of(game, Arm(algorithm), rate, seed)), 40)})


def share(name: str, at_most: float, predicted: float) -> Prediction:
    """Predict what share of GRPO's noise is left in eight rounds."""

    def of(found: Found) -> float:
        return found[f"{name} @ 8"]["tokens"] / found["grpo @ 8"]["tokens"]

    return Prediction(
        f"8 rounds: `{name}` needs {at_most:g} times the tokens of `grpo`, or less (predicted {predicted:.2f})",
        of,
        at_most=at_most,
        turned=1.0,
    )


CLAIM = Claim(
    name="turn_sets",
    algorithms=("at_grpo", "magrpo", "gigpo"),
    claim="Comparing turns with the same index, or turns with equal states, removes the variance of earlier rewards",
    source="AT-GRPO, 2510.11062; MAGRPO, 2508.04652; GiGPO, 2505.10978, eq. 7",
    setting=(
        "One agent chooses a letter in each of several rounds; in each round one of four letters is correct, and "
        "the reward comes immediately. Eight episodes per step, differences without division by the standard "
        "deviation. Noise is the number of tokens over which updates must be averaged until their error is as "
        "large as the exact gradient."
    ),
    arms={
        f"{label} @ {rounds}": (rounds, {**algorithm, "group_size": 8, "scale": "none"})
        for rounds in ROUNDS
        for label, algorithm in SETS.items()
    },
    measure=measure,
    predictions=(
        share("at_grpo", 0.7, 36 / 64).about("at_grpo"),
        share("magrpo", 0.7, 36 / 64).about("magrpo"),
        share("gigpo", 0.8, 43 / 64).about("gigpo"),
        Prediction(
            "1 round: difference in noise between `gigpo` and `grpo`, as a share of that of `grpo`",
            lambda found: abs(found["gigpo @ 1"]["tokens"] / found["grpo @ 1"]["tokens"] - 1.0),
            at_most=0.1,
        ).about("gigpo"),
    ),
    plot="lines",
    plotted=("tokens", "rounds", "noise: tokens of updates"),
    logarithmic=True,
    remark=(
        "The prediction follows from what differs between episodes. Over T rounds, GRPO's update of a turn "
        "contains the randomness of all T rounds, and a return from the turn on contains that of T, T − 1 … 1 "
        "rounds. GiGPO's sum of both contains a quarter of that of earlier rounds, relative to its signal. If a "
        "game gives rewards only at the end, all four are equal."
    ),
)
