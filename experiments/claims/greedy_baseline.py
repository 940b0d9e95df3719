"""ReMax's greedy attempt as the baseline, whose tokens count, against none and against a group's mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of

GAME = {"name": "unequal", "seats": 1, "letters": 8, "right_letters": (1, 1, 1, 1)}
GIFTS = (0.0, 0.3, 0.6, 0.9)


def start(seen: str) -> Mapping[str, float]:
    """Say the right letter a little less often than others, so that the greedy attempt is wrong."""
    return {"A": -0.1}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure the noise of the first update, where tasks pay unequally for nothing and where they do not."""
    found = {}
    for name, anyway in (("unequal", GIFTS), ("equal", ())):
        game = {**GAME, "anyway": anyway}
        training = {"tasks_per_step": 32 // algorithm["group_size"]}
        run = TableRun(recipe_of(game, Arm(algorithm), rate, seed, training=training), start)
        # As many greedy tokens as sampled ones.
        found[name] = anatomy(run, 60).noise * (2 if algorithm["name"] == "remax" else 1)
    return Result(found)


def ratio(arm: str, other: str, tasks: str) -> Any:
    """Return the ratio of two arms' noise."""
    return lambda found: found[arm][tasks] / found[other][tasks]


CLAIM = Claim(
    name="greedy_baseline",
    algorithms=("remax",),
    claim="A greedy completion as the baseline saves tokens only if tasks differ in constant reward, and then it saves as many as a second sample",
    source="ReMax, 2310.10505, §3.2",
    setting=(
        "One agent, tasks of eight letters of which one is correct; in one game the tasks also give constant "
        "rewards of 0, 0.3, 0.6 and 0.9, and in the other game they do not. The measure is the noise of the first "
        "update from 32 sampled tokens, including tokens of greedy episodes. By simulation, noise is 285, 67 and "
        "67 tokens without a baseline, for ReMax and for groups of two if tasks have unequal rewards, and 37, 68 "
        "and 67 if they do not."
    ),
    arms={
        "remax": {"name": "remax", "group_size": 1},
        "groups of two": {"name": "rloo", "group_size": 2},
        "none": {"name": "experiments.ablations:Plain", "group_size": 2},
    },
    measure=measure,
    predictions=(
        Prediction(
            "unequal rewards: no baseline has at least 3 times the noise of ReMax",
            ratio("none", "remax", "unequal"),
            at_least=3.0,
            turned=1.0,
        ),
        Prediction(
            "unequal rewards: ReMax has at most 1.25 times the noise of groups of two",
            ratio("remax", "groups of two", "unequal"),
            at_most=1.25,
        ),
        Prediction(
            "equal rewards: ReMax has at least 1.5 times the noise of no baseline",
            ratio("remax", "none", "equal"),
            at_least=1.5,
            turned=1.0,
        ),
    ),
    plot="bars",
    plotted=("unequal", "", "noise of the update, tokens"),
)
