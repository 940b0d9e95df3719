"""Updates one after another against updates at once, where each is right alone and both are wrong together."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import FAR, Arm, TableRun, moves, recipe_of

GAME = {"name": "matrix", "game": "custom", "payoffs": {"AA": 0, "AB": 1, "BA": 1, "BB": -3}}
SELDOM = 0.12
"""Chance of B at first."""
SETTLING, REPEATS = 3, 28


def measure(arm: tuple[dict[str, Any], float], seed: int, rate: float) -> Result:
    """Take the same step again and again from the same policies; say what it does to the team's exact worth."""
    algorithm, size = arm
    settings = {"group_size": 64, "epochs": 1, "gae": {"normalise": "none", "lam": 1.0}}
    recipe = recipe_of(GAME, Arm({**settings, **algorithm}), size, seed, optimizer={"critic_lr": 0.1 * FAR})
    run = TableRun(recipe, lambda seen: {"B": math.log(SELDOM / (1 - SELDOM))})
    before = run.value
    changes = [run.value - before for _ in moves(run, SETTLING + REPEATS)][SETTLING:]
    return Result(
        {
            "change": fmean(changes),
            "worst": min(changes),
            "falls": fmean(change < -1e-6 for change in changes),
        }
    )


def of(arm: str, measured: str) -> Any:
    """Return a measure of an arm."""

    def number(found: Found) -> float:
        return found[arm][measured]

    return number


def less(one: str, other: str) -> Any:
    """Return by how much an arm's mean change is greater than another's."""

    def number(found: Found) -> float:
        return found[one]["change"] - found[other]["change"]

    return number


SIZES = (0.5, 2.0, 8.0, 32.0)
ORDERS: dict[str, dict[str, Any]] = {
    "happo": {"name": "happo"},
    "mappo": {"name": "mappo"},
    "mappo, one at a time": {"name": "mappo", "order": {"name": "alternate"}},
}
CLAIM = Claim(
    name="happo_monotone",
    algorithms=("happo", "mappo"),
    claim="Simultaneous large updates can lower the team return where each alone raises it; sequential updates avoid this",
    source="HAPPO, 2109.11251, §4",
    setting=(
        "Two agents say A or B. B said by one of them earns each 1, said by both it costs each 3, and at first each says it with chance 0.12, so that more of it is better for either. One step from there by 64 episodes, again and again, by steps of "
        "several sizes: by how much what both earn in all changes, exactly."
    ),
    arms={f"{name} @ {size:g}": (order, size) for size in SIZES for name, order in ORDERS.items()},
    measure=measure,
    predictions=(
        Prediction(
            "`mappo`'s largest steps change the team return by", of("mappo @ 32", "change"), at_most=-1.0
        ).about("mappo"),
        Prediction("`happo`'s largest steps change it by", of("happo @ 32", "change"), at_least=0.0).about(
            "happo"
        ),
        Prediction(
            "share of `happo`'s largest steps after which it has fallen",
            of("happo @ 32", "falls"),
            at_most=0.1,
        ).about("happo"),
        Prediction(
            "`happo`'s smallest steps are better than `mappo`'s by",
            less("happo @ 0.5", "mappo @ 0.5"),
            at_most=0.05,
        ).about("happo"),
        Prediction(
            "`happo`'s largest steps are better than one agent's alone by",
            less("happo @ 32", "mappo, one at a time @ 32"),
            at_least=0.0,
            turned=-0.1,
        ).about("happo"),
    ),
    plot="lines",
    plotted=("change", "size of the step", "change of the team return"),
    remark=(
        "`mappo` is `happo` without the factor M: with tables of their own, agents that move one after another and at once move alike but for it. With the smallest steps the two are the same. The largest ones lower "
        "the worth in four of five cases with `mappo` and in one of twenty with `happo`, whose promise is about exact expectations, and which has 64 episodes. With seven repeats in place of 28 the share of "
        "falls was not shown: one of seven is more than its bound. One agent at a time is safe too, and gains less than half as much."
    ),
)
