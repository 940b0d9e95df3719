"""UMAD's relative gain: what it does to the steps of a sure agent and of one that is not."""

from __future__ import annotations

import math
from typing import Any

import torch

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, exact_gradient, moves, recipe_of

GAME = {"name": "sum_game", "seats": 2, "letters": 4}
SURE = math.log(7.0)
"""Logit of a letter that is said with 0.7 where three others have 0.1 each."""
ALPHA = 0.5


def start(seen: str) -> dict[str, float]:
    """Let the first agent say the right letter with 0.7, and the second any."""
    return {"A": SURE} if seen.startswith("1/") else {}


def measure(umad: dict[str, float], seed: int, rate: float) -> Result:
    """Return each agent's signal over noise: the mean step along the gradient over a step's distance from the mean."""
    algorithm: dict[str, Any] = {"name": "grpo", "group_size": 32, "scale": "none", "umad": umad}
    run = TableRun(recipe_of(GAME, Arm(algorithm), 1.0, seed), start)
    exact = exact_gradient(run)
    steps = [moved for moved, _ in moves(run, 60)]
    found = {}
    for name, agent in zip(("sure", "unsure"), run.team.trained, strict=True):
        own = torch.stack([moved[agent].detach() for moved in steps])
        mean = own.mean(0)
        along = float((mean * exact[agent]).sum() / exact[agent].norm())
        found[name] = along / float((own - mean).square().sum((1, 2)).mean().sqrt())
    return Result(found)


def times(agent: str) -> Any:
    """Return an agent's signal over noise with the gain, over that without."""

    def of(found: Found) -> float:
        return found["gain"][agent] / found["none"][agent]

    return of


CLAIM = Claim(
    name="umad_relative",
    algorithms=("umad",),
    claim="UMAD's relative gain shifts learning to the more confident agent: this agent's steps lose variance, and those of the other agents gain variance",
    source="UMAD, 2603.01221",
    setting=(
        "Two agents choose one of four letters each, and the reward is the share of correct letters; one agent is "
        "correct with probability 0.7, the other has a uniform policy. 60 first steps of 32 episodes, with and "
        "without `umad.relative` 0.5, of GRPO without scale. Signal over noise is the mean step along the exact "
        "gradient divided by a step's distance from the mean, so it does not depend on the learning rate."
    ),
    arms={"none": {}, "gain": {"relative": ALPHA}},
    measure=measure,
    predictions=(
        Prediction(
            "Signal over noise of the confident agent, with the gain divided by without; by simulation 1.21",
            times("sure"),
            at_least=1.1,
            turned=1.0,
        ),
        Prediction(
            "Signal over noise of the other agent, with the gain divided by without; by simulation 0.72",
            times("unsure"),
            at_most=0.85,
            turned=1.0,
        ),
    ),
    plot="bars",
    plotted=("unsure", "", "signal over noise of one step, less confident agent"),
)
