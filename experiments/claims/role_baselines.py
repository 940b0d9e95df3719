"""RAE's mean for each role against one for all, where a seat is favoured."""

from __future__ import annotations

from typing import Any

from experiments.ablations import OneBaseline
from experiments.claim import Claim, Found, Prediction, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of

LETTERS = "ABCD"
TOKENS = 800
ONE = OneBaseline.model_fields["name"].default


def game(favour: float) -> dict[str, Any]:
    """Return a zero-sum game in which a seat wins 1 by its best letter, and the first one `favour` in any case."""
    paid = {(a, b): favour + (a == "A") - (b == "A") for a in LETTERS for b in LETTERS}
    return {
        "name": "matrix",
        "game": "custom",
        "rules": "none",
        "payoffs": {a + b: (won, -won) for (a, b), won in paid.items()},
    }


def measure(arm: tuple[str, float], seed: int, rate: float) -> Result:
    """Let one policy learn both seats by playing itself."""
    name, favour = arm
    seats = [{"name": f"agent_{seat}", "weights": {"adapter": "both"}} for seat in range(2)]
    arm_of_both = Arm({"name": name, "group_size": 8}, {"team": {"agents": seats}})
    recipe = recipe_of(game(favour), arm_of_both, rate, seed)
    curve = learn(TableRun(recipe), TOKENS, 2, lambda run: (run.likes(0, "A") + run.likes(1, "A")) / 2)
    return Result({"area": curve.area(TOKENS)}, list(zip(curve.tokens, curve.values, strict=True)))


def closeness(found: Found) -> float:
    """Return how much a mean for each role gains where none is favoured."""
    return abs(found["by role, even seats"]["area"] - found["one mean, even seats"]["area"])


CLAIM = Claim(
    name="role_baselines",
    algorithms=("rae",),
    claim="If one role has an advantage, self-play with a baseline per role learns what a shared baseline prevents",
    source="SPIRAL, 2506.24119",
    setting=(
        "One policy plays both roles of a zero-sum game against itself. A player wins 1 with one of four letters, "
        "whatever the other player chooses, and the first player also receives a constant 3, or 0 (*even seats*). "
        "The curve is the probability of the winning letter, averaged over both roles."
    ),
    arms={
        "by role": ("rae", 3.0),
        "one mean": (ONE, 3.0),
        "by role, even seats": ("rae", 0.0),
        "one mean, even seats": (ONE, 0.0),
    },
    measure=measure,
    rates=(1.0, 4.0, 16.0),
    predictions=(
        better("by role", "one mean", 0.1),
        Prediction("equal roles: difference in return between the two baselines", closeness, at_most=0.03),
    ),
    quick=4,
    plotted=("area", "", "probability of the winning letter"),
    remark=(
        "The return minus the common mean is 3 for the first player and −3 for the second, whatever they choose, "
        "while the difference to be learned is 1: at first this is 25 times the variance, by E(R − b)². In the "
        "repetition, `one mean` learns the letter at the rate of 4 in three of ten seeds and partly in the others "
        "(0.44 to 0.96), `by role` in all (0.81 to 0.94): the mean advantage is there, but its interval is wide."
    ),
)
