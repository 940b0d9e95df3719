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
    claim="Sampling several candidates per turn, of which one continues, reduces the variance of an update per sampled token",
    source="AT-GRPO, 2510.11062",
    setting=(
        "The game is a chain of two or four agents: each agent must choose the letter that follows the previous "
        "agent's letter, and at first it does so with probability one half. A step has eight episodes, or eight "
        "candidates of every turn, each evaluated by one continuation. Noise is the number of tokens, including "
        "continuations, over which updates must be averaged until their error is as large as the exact gradient."
    ),
    arms={
        f"{label} @ {agents}": (agents, {**algorithm, "team_reward": "sum"})
        for label, by_agents in CONTENDERS.items()
        for agents, algorithm in by_agents.items()
    },
    measure=measure,
    predictions=(
        at_most("tree", "no tree", 2, 0.9, "`tree` needs at most 0.9 times the tokens of `no tree`"),
        at_most("tree", "no tree", 4, 0.9, "`tree` needs at most 0.9 times the tokens of `no tree`"),
        at_most(
            "c3",
            "tree",
            4,
            0.5,
            "`c3`, which also trains the leaves, needs at most half the tokens of `tree`",
        ),
    ),
    plot="lines",
    plotted=("tokens", "agents", "noise: tokens of updates"),
    logarithmic=True,
    remark=(
        "A candidate costs its own turn and all later turns: for a chain of n agents, (n + 1)/2 times the tokens "
        "of whole episodes. For the first agent, a candidate with one continuation carries no more information "
        "than an episode. All candidates of a later agent respond to *one* history, and if this history contains "
        "an incorrect letter, every candidate has return 0; whole episodes give eight histories. Training on the "
        "leaves and continuing several turns ([c3](algorithms/c3.md)) recovers most of this loss. Its update is "
        "still noisier than that of whole episodes, because turns that share earlier turns also share their "
        "randomness; the advantage of C3 is that its steps are cheaper."
    ),
)
