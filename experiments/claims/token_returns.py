"""REINFORCE++'s return from each token on, against the whole return and against sets of its own for every turn."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of

ROUNDS = 8
GAME = {"name": "long_game", "seats": 1, "rounds": ROUNDS}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure noise and direction of the first update."""
    recipe = recipe_of(GAME, Arm({"group_size": 32, **algorithm}), rate, seed)
    found = anatomy(TableRun(recipe), 40)
    return Result({"noise": found.noise, "cosine": found.cosine})


def times(one: str, other: str) -> Any:
    """Return an arm's noise over another's."""

    def of(found: Found) -> float:
        return found[one]["noise"] / found[other]["noise"]

    return of


CLAIM = Claim(
    name="token_returns",
    algorithms=("reinforce_plus_plus",),
    claim="The return from a token on excludes earlier rewards from the token's credit; a single mean over all tokens brings part of the variance back",
    source="REINFORCE++, 2501.03262, §3",
    setting=(
        "One agent chooses a letter in each of eight rounds; in each round one of four letters is correct, and "
        "the reward comes immediately. A step has 32 episodes of the single task. Noise is the number of tokens "
        "over which updates must be averaged until their error is as large as the exact gradient. By hand, it is "
        "proportional to 2 + 3·7 with the whole return and to 2 + 3·3.5 + 5.25 with the return from the token on, "
        "where 5.25 is the variance of the expected remaining return. Without this variance it is proportional to "
        "2 + 3·3.5."
    ),
    arms={
        "from the token on": {"name": "reinforce_plus_plus"},
        "the whole return": {"name": "experiments.ablations:Plain", "baseline": "batch"},
        "from the turn on, a mean for each": {"name": "at_grpo", "scale": "none"},
    },
    measure=measure,
    predictions=(
        Prediction(
            "Noise of `from the token on`, divided by that of `the whole return`; by hand 0.77",
            times("from the token on", "the whole return"),
            at_most=0.9,
            turned=1.0,
        ),
        Prediction(
            "Noise of `from the token on`, divided by that of `from the turn on, a mean for each`; by hand 1.42",
            times("from the token on", "from the turn on, a mean for each"),
            at_least=1.2,
            turned=1.0,
        ),
        Prediction(
            "Cosine of `from the token on`'s expected update to the gradient",
            lambda found: found["from the token on"]["cosine"],
            at_least=0.97,
        ),
    ),
    plot="bars",
    plotted=("noise", "", "noise of the update, tokens"),
    quick=2,
)
