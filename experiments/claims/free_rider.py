"""A free rider: how much of each credit goes to an agent whose words are worth nothing."""

from __future__ import annotations

from typing import Any

import torch

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import FAR, Arm, TableRun, moves, recipe_of

MANY: dict[str, Any] = {"group_size": 12, "team_reward": "sum"}
FEW: dict[str, Any] = {"group_size": 4, "team_reward": "sum"}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure how far updates push the rider, and how far the others; square roots of mean squares."""
    game = {"name": "sum_game", "seats": 4, "riders": 1}
    run = TableRun(recipe_of(game, Arm(algorithm, {"optimizer": {"critic_lr": 0.25 * FAR}}), rate, seed))
    found = [step for step, _ in moves(run, 30)]
    far = [
        float(torch.stack([step[name] for step in found]).detach().square().sum((1, 2)).mean())
        for name in run.team.trained
    ]
    return Result({"rider": (far[3] / (sum(far[:3]) / 3)) ** 0.5})


def at_most(name: str, share: float, why: str) -> Prediction:
    """Predict how far a rider is pushed."""

    def of(found: Found) -> float:
        return found[name]["rider"]

    return Prediction(
        f"`{name}` pushes the rider {share:g} times as far as the others, or less ({why})", of, at_most=share
    )


CLAIM = Claim(
    name="free_rider",
    algorithms=("ccpo", "counterfactual", "sharp"),
    claim="Counterfactual credit does not change the policy of an agent that has no influence on the reward",
    source="CCPO, 2603.21563; SHARP, 2602.08335",
    setting=(
        "Four agents choose a letter simultaneously. Three of them have one correct letter of four and add a "
        "third to the reward if they choose it; the fourth adds nothing, whatever it chooses. The measure is the "
        "distance by which one update moves the fourth agent, divided by the distance by which it moves one of "
        "the others."
    ),
    arms={
        "grpo": {"name": "grpo", **MANY},
        "magrpo": {"name": "magrpo", **MANY},
        "mappo": {"name": "mappo", **MANY},
        "sharp": {"name": "sharp", **FEW},
        "counterfactual": {"name": "counterfactual", **FEW},
        "ccpo": {"name": "ccpo", **FEW},
    },
    measure=measure,
    predictions=(
        Prediction(
            "`grpo` pushes the rider at least 0.6 times as far as the others",
            lambda found: found["grpo"]["rider"],
            at_least=0.6,
        ),
        at_most("counterfactual", 1e-6, "the partners' letters are the same in both terms").about(
            "counterfactual"
        ),
        at_most("ccpo", 1e-6, "the partners' letters are also the same without the rider").about("ccpo"),
        at_most("sharp", 0.9, "coalitions without other partners are sampled again, which adds noise").about(
            "sharp"
        ),
    ),
    plot="bars",
    plotted=("rider", "", "update of the agent without influence"),
)
