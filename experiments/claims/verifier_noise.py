"""Learning from a verifier that errs by chance: how much slower it is, and where it stands still."""

from __future__ import annotations

import math
from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, exact_gradient, moves, recipe_of

LEARNED = (0.0, 0.2, 0.4)
"""Noise under which teams learn to the end, too; where it is not scaled."""
MOST = 200
RATE = 1.0


def measure(arm: tuple[str, float], seed: int, rate: float) -> Result:
    """Return how far a step goes along the true gradient, in units of its length, and the steps to 0.8."""
    scale, noise = arm
    game = {"name": "sum_game", "seats": 1, "letters": 4, "noise": noise}
    algorithm: dict[str, Any] = {"name": "grpo", "group_size": 32, "scale": scale}
    run = TableRun(recipe_of(game, Arm(algorithm), RATE, seed))
    [name] = run.team.trained
    exact = exact_gradient(run)[name]
    found = [moved[name].detach() for moved, _ in moves(run, 40)]
    mean = sum(found[1:], found[0]) / len(found) / RATE
    measures = {"speed": float((mean * exact).sum() / exact.square().sum())}
    if scale == "none" and noise in LEARNED:
        run = TableRun(recipe_of(game, Arm(algorithm), RATE, seed))
        while run.value < 0.8 and run.number < MOST:
            run.step()
        measures["steps"] = float(run.number)
    return Result(measures)


def share(scale: str, noise: float, expected: float) -> Prediction:
    """Return the prediction of what share of the speed without noise is left."""

    def off(found: Found) -> float:
        left = found[f"{SHOWN[scale]} @ {noise:g}"]["speed"] / found[f"{SHOWN[scale]} @ 0"]["speed"]
        return abs(left - expected)

    text = f"`{SHOWN[scale]}`, noise {noise:g}: distance of what is left of the speed from {expected:.2f}"
    return Prediction(text, off, at_most=0.15, turned=0.25)


def longer(noise: float, at_least: float, expected: float) -> Prediction:
    """Return the prediction that learning takes so many times the steps."""
    text = f"`{SHOWN['none']}`, noise {noise:g}: times the steps to 0.8; by the speed {expected:.1f}"
    return Prediction(
        text,
        lambda found: found[f"{SHOWN['none']} @ {noise:g}"]["steps"] / found[f"{SHOWN['none']} @ 0"]["steps"],
        at_least=at_least,
        turned=1.0,
    )


def scaled(noise: float, right: float = 0.25) -> float:
    """Return what is left of the speed of (R − mean)/std, for a team that is right with this chance."""
    paid = noise + (1 - 2 * noise) * right
    return (1 - 2 * noise) * math.sqrt(right * (1 - right) / (paid * (1 - paid)))


SHOWN = {"none": "R − mean", "std": "(R − mean)/std"}
CLAIM = Claim(
    name="verifier_noise",
    algorithms=("grpo", "verifier", "maporl"),
    claim="A verifier with error rate p slows learning by a factor of 1 − 2p, and for p > ½ it reverses learning",
    source="perturbed rewards: 1810.01032, §3; verifiers with errors: 2510.00915, §3",
    setting=(
        "One agent, four letters of which one has reward 1, and a verifier that changes 0 to 1 and 1 to 0 with "
        "probability p. Speed is the mean initial update of 1,280 episodes along the exact gradient. Then teams "
        "learn until their success is 0.8, with one small learning rate and 32 episodes per step. By hand, 1 − 2p "
        "of the speed is left. With division by the std, it is multiplied by √(q(1 − q)/m(1 − m)), where q is the "
        "probability of a correct answer and m the probability of a reward."
    ),
    arms={
        f"{SHOWN[scale]} @ {noise:g}": (scale, noise)
        for scale in SHOWN
        for noise in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    },
    measure=measure,
    predictions=(
        share("none", 0.2, 0.6),
        share("none", 0.4, 0.2),
        share("none", 0.5, 0.0),
        share("std", 0.2, scaled(0.2)),
        share("std", 0.4, scaled(0.4)),
        longer(0.2, 1.3, 1 / 0.6),
        longer(0.4, 3.0, 5.0),
    ),
    plot="lines",
    plotted=("speed", "error rate of the verifier", "speed along the true gradient"),
)
