"""Truncated importance weights against PPO's ratio alone and against no correction, with samples of weights up to 16 steps old."""

from __future__ import annotations

import math
from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, recipe_of

GAME = {"name": "sum_game", "seats": 1, "letters": 4}
STEPS = 80
ENTROPY = 0.5
BEST = ENTROPY * math.log(math.exp(1 / ENTROPY) + 3)
"""The greatest pay plus entropy bonus: that of softmax(pay / 0.5)."""
LOSS = {"entropy_coefficient": ENTROPY}
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 16, "scale": "none", "loss": LOSS}
WAYS: dict[str, dict[str, Any]] = {
    "TIS": {**GRPO, "loss": {**LOSS, "importance_cap": 2.0}},
    "ratio to the sampler": GRPO,
    "no correction": {**GRPO, "name": "experiments.ablations:Uncorrected"},
}


def measure(arm: tuple[str, int], seed: int, rate: float) -> Result:
    """Let one agent learn from samples so many steps old; its regret is by how much pay and bonus fall short of the best."""
    way, age = arm
    over = {"tasks_per_step": 1, "max_staleness": age}
    run = TableRun(recipe_of(GAME, Arm(WAYS[way]), rate, seed, training=over))
    regrets = []
    for _ in range(STEPS):
        run.step()
        chances = run.say(0, "1/1 0")
        entropy = -sum(chance * math.log(chance) for chance in chances.values() if chance)
        regrets.append(BEST - chances["A"] - ENTROPY * entropy)
    regret = sum(regrets) / STEPS
    return Result({"area": BEST - regret, "regret": regret})


def times(one: str, other: str, at_least: float) -> Prediction:
    """Return the prediction that an arm's regret is so many times another's; contradicted if it is smaller."""

    def ratio(found: Found) -> float:
        return found[one]["regret"] / found[other]["regret"]

    return Prediction(f"Regret, `{one}` over `{other}`", ratio, at_least=at_least, turned=1.0)


CLAIM = Claim(
    name="staleness",
    algorithms=("grpo", "ppo"),
    claim="With stale samples, truncated importance weights learn fast and stably, no correction overshoots, and PPO's clip stalls",
    source="IMPALA, 1802.01561, §5.2.1; decoupled PPO, 2110.00641, §3, and AReaL, 2505.24298, §5.2",
    setting=(
        "One agent, four letters of which one has reward 1, and an entropy coefficient of 0.5, so that the best "
        "policy is a mixture (0.71 for the correct letter) that can be overshot. 16 episodes per step, 80 steps, "
        "sampled with the weights of 0, 1, 4 or 16 steps before (`training.max_staleness`). Regret is the average "
        "over the steps of the difference between the best value of reward plus entropy bonus and the current "
        "one."
    ),
    arms={f"{way} @ {age}": (way, age) for way in WAYS for age in (0, 1, 4, 16)},
    measure=measure,
    rates=(0.5, 2.0, 8.0),
    predictions=(
        times("no correction @ 16", "TIS @ 16", 2.0),
        times("ratio to the sampler @ 16", "TIS @ 16", 2.0),
        times("no correction @ 4", "TIS @ 4", 1.2),
        Prediction(
            "Regret of `TIS`, samples of 16 steps before divided by fresh samples",
            lambda found: found["TIS @ 16"]["regret"] / found["TIS @ 0"]["regret"],
            at_most=1.5,
        ),
    ),
    plot="lines",
    plotted=("regret", "age of the samples, steps", "regret"),
)
