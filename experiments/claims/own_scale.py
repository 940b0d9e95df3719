"""Agents with returns of different scale: normalised each by its own, or all together."""

from __future__ import annotations

from typing import Any

from experiments.ablations import Together
from experiments.claim import Claim, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of

LETTERS = "ABCD"
TOKENS = 800
SCALES = (10.0, 0.1)
GAME = {
    "name": "matrix",
    "game": "custom",
    "rules": "none",
    "payoffs": {
        a + b: tuple(scale * ((a == "A") + (b == "A")) for scale in SCALES) for a in LETTERS for b in LETTERS
    },
}
ALL: dict[str, Any] = {
    "name": Together.model_fields["name"].default,
    "group_size": 8,
    "team_reward": "individual",
}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let both agents learn, and look at the one that has learned less."""
    curve = learn(
        TableRun(recipe_of(GAME, Arm(algorithm), rate, seed)),
        TOKENS,
        2,
        lambda run: min(run.likes(0, "A"), run.likes(1, "A")),
    )
    return Result({"area": curve.area(TOKENS)}, list(zip(curve.tokens, curve.values, strict=True)))


CLAIM = Claim(
    name="own_scale",
    algorithms=("dr_mas", "mars"),
    claim="If agents' rewards have different scales, each agent needs its own mean and standard deviation",
    source="Dr.MAS; MARS, 2510.15414",
    setting=(
        "Two agents with separate weights choose one of four letters simultaneously. Each is rewarded for the "
        "number of correct letters among the two; the first receives 10 per correct letter and the second 0.1. "
        "Eight episodes per step, one learning rate for both. The curve is the probability of the correct letter "
        "for the agent that has learned less. `one spread` divides differences from an agent's own mean by the "
        "standard deviation of all returns; `one mean and spread` compares all returns with each other."
    ),
    arms={
        "dr_mas": {"name": "dr_mas", "group_size": 8, "team_reward": "individual"},
        "mars": {"name": "mars", "group_size": 8, "team_reward": "individual"},
        "one spread": {**ALL, "one": "spread"},
        "one mean and spread": ALL,
    },
    measure=measure,
    rates=(0.3, 3.0, 30.0, 100.0),
    predictions=(
        better("dr_mas", "one spread", 0.1).about("dr_mas"),
        better("dr_mas", "one mean and spread", 0.3).about("dr_mas"),
        better("mars", "one mean and spread", 0.3).about("mars"),
        better("one spread", "one mean and spread", 0.05),
    ),
    plotted=("area", "", "probability of the correct letter"),
    remark=(
        "With one standard deviation, the second agent's advantages are a hundred times smaller than the first's. In the "
        "first run, no learning rate of the grid suits both agents. The wider grid of the repetition contains one that does "
        "(3700), because a step that is a thousand times too large does no harm to a table whose letter is already correct. With one mean as well, they are also all negative, and only 0.01 of "
        "their size depends on which letter was better."
    ),
)
