"""AT-GRPO's tree against none, and against a tree whose leaves are trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, noise, recipe_of, relay_start

CONTENDERS: Mapping[str, Mapping[int, Mapping[str, Any]]] = {
    "no tree": {n: {"name": "at_grpo", "group_size": 8, "scale": "none"} for n in (2, 4)},
    "tree": {n: {"name": "at_grpo", "group_size": 8, "scale": "none", "tree": True} for n in (2, 4)},
    "c3": {
        2: {"name": "c3", "widths": [4, 2]},
        4: {"name": "c3", "widths": [2, 2, 2, 1]},
    },
}


def measure(arm: tuple[int, Mapping[str, Any]], seed: int, rate: float) -> Result:
    """Measure the noise of the first update."""
    agents, algorithm = arm
    recipe = recipe_of({"name": "relay", "seats": agents}, Arm(algorithm), rate, seed)
    return Result({"tokens": noise(TableRun(recipe, relay_start([0.5] * agents)), 40)})


def at_most(one: str, other: str, agents: int, share: float, says: str) -> Prediction:
    """Predict what share of another's noise one has."""

    def of(found: Found) -> float:
        return found[f"{one} @ {agents}"]["tokens"] / found[f"{other} @ {agents}"]["tokens"]

    return Prediction(f"{agents} agents: {says}", of, at_most=share, turned=1.0)


CLAIM = Claim(
    name="at_grpo_tree",
    algorithms=("at_grpo",),
    claim="Several candidates per turn, of which one continues, reduce the variance of an update per sampled token",
    source="AT-GRPO, 2510.11062",
    setting="Chains of two and four agents: each must say the letter that follows the one before, and does so with a chance of a half at first. Eight attempts, or eight candidates of every turn, each judged by one continuation. Noise is the number of tokens, "
    "continuations included, over which updates must be averaged until their error is as large as the exact gradient.",
    arms={
        f"{label} @ {agents}": (agents, {**algorithm, "team_reward": "sum"})
        for label, by_agents in CONTENDERS.items()
        for agents, algorithm in by_agents.items()
    },
    measure=measure,
    predictions=(
        at_most("tree", "no tree", 2, 0.9, "a tree needs 0.9 times the tokens of none, or less"),
        at_most("tree", "no tree", 4, 0.9, "a tree needs 0.9 times the tokens of none, or less"),
        at_most(
            "c3",
            "tree",
            4,
            0.5,
            "`c3`, whose leaves are trained on, needs half the tokens of such a tree, or less",
        ),
    ),
    plot="lines",
    plotted=("tokens", "agents", "noise: tokens of updates"),
    logarithmic=True,
    remark="A candidate costs its own turn and all that follow: (n + 1)/2 times the tokens of whole attempts, for a chain of n. For the first agent, a candidate that is judged by one continuation says no more than an attempt does. All candidates of a later agent answer *one* "
    "history, and once that holds a wrong letter they are all worth nothing; whole attempts see eight. Trained leaves and histories that go on from several turns ([c3](algorithms/c3.md)) take most of it back, and still the update is noisier than that of whole attempts, since turns that share a beginning share its luck: "
    "what C3 gains is cheaper steps.",
)
