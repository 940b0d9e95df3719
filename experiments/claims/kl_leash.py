"""Where a policy on a leash settles: by k1 in the reward, k2 in the loss, and k3 in the loss."""

from __future__ import annotations

import math
from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, recipe_of

GAME = {"name": "sum_game", "seats": 1, "letters": 4}
BETA = 0.3
STEPS, LAST = 80, 30
BY_REVERSE = 1 / (1 + 3 * math.exp(-1 / BETA))
"""The chance of the right letter that is best for pay − β·KL(π‖reference): softmax(pay / β)."""
BY_FORWARD = (1 - BETA + math.sqrt((1 - BETA) ** 2 + BETA)) / 2
"""The same for pay − β·KL(reference‖π): where p(1 − p) = β(p − ¼)."""


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let one agent learn a letter on a leash; its chance of it is averaged over the last steps."""
    run = TableRun(recipe_of(GAME, Arm(algorithm), rate, seed))
    places, chances, spent = [0], [run.value], 0
    for _ in range(STEPS):
        groups, _ = run.step()
        spent += sum(len(group.episodes) for group in groups)
        places.append(spent)
        chances.append(run.value)
    settled = sum(chances[-LAST:]) / LAST
    return Result({"right": settled}, list(zip(places[::2], chances[::2], strict=True)))


def settles(arm: str, at: float, of: str) -> Prediction:
    """Return the prediction that a policy settles within 0.02 of a chance."""
    return Prediction(
        f"`{arm}`: distance from {at:.3f}, the optimum with {of}",
        lambda found: abs(found[arm]["right"] - at),
        at_most=0.02,
        turned=(BY_REVERSE - BY_FORWARD) / 2,
    )


GRPO = {"name": "grpo", "group_size": 32, "scale": "none"}
CLAIM = Claim(
    name="kl_leash",
    algorithms=("grpo",),
    claim="With k2 in the loss or k1 in the reward, the policy converges to the maximum of reward − β·KL(π‖reference); with k3 in the loss it converges to another policy",
    source="2506.09477, §3; GRPO's penalty: 2402.03300, eq. 3 and 4",
    setting=(
        "One agent, four letters of which one has reward 1, a uniform reference and β = 0.3. 80 steps with 32 "
        "episodes each; the measure is the probability of the correct letter in the last 30 steps. By hand: "
        f"{BY_REVERSE:.3f} with KL(π‖reference), {BY_FORWARD:.3f} with KL(reference‖π)."
    ),
    arms={
        "k1 in the reward": {
            "name": "ippo",
            "group_size": 32,
            "epochs": 1,
            "gae": {"normalise": "none", "kl_in_reward": BETA},
        },
        "k2 in the loss": {**GRPO, "loss": {"kl_coefficient": BETA, "kl_estimator": "k2"}},
        "k3 in the loss": {**GRPO, "loss": {"kl_coefficient": BETA, "kl_estimator": "k3"}},
    },
    measure=measure,
    rates=(1.0,),
    predictions=(
        settles("k1 in the reward", BY_REVERSE, "KL(π‖reference)"),
        settles("k2 in the loss", BY_REVERSE, "KL(π‖reference)"),
        settles("k3 in the loss", BY_FORWARD, "KL(reference‖π)"),
    ),
    landmarks=lambda: {"optimum, KL(π‖reference)": BY_REVERSE, "optimum, KL(reference‖π)": BY_FORWARD},
    plotted=("", "", "probability of the correct letter"),
)
