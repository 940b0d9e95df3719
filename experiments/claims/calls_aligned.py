"""M-GRPO's alignment: an attempt counts once for an agent, however often it was called."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of
from experiments.relays import Calls

NOISE = 0.2
CALLED = "agent_1"


def measure(arm: tuple[str, bool], seed: int, rate: float) -> Result:
    """Measure noise and direction of the first update of the one that is called, and how far each case moves it."""
    align, told = arm
    game = {"name": Calls.model_fields["name"].default, "seats": 2, "told": told, "noise": NOISE}
    algorithm: dict[str, Any] = {"name": "m_grpo", "group_size": 4, "scale": "none", "align": align}
    run = TableRun(recipe_of(game, Arm(algorithm), rate, seed, training={"tasks_per_step": 16}))
    found = anatomy(run, 60)
    mean, towards = found.steps[CALLED].mean(0), found.gradient[CALLED]
    own = found.steps[CALLED] / (mean * towards).sum() * towards.square().sum()
    measured = {
        "noise": float((own - towards).square().sum((1, 2)).mean() / towards.square().sum()) * found.tokens
    }
    if told:
        once, often = found.multiples(CALLED, [run.row("2/2 0"), run.row("2/2 1")])
        measured["ratio"] = once / often
    return Result(measured)


CLAIM = Claim(
    name="calls_aligned",
    algorithms=("m_grpo",),
    claim="Weights that make every episode count equally for an agent reduce variance if all calls of the agent are alike, and add bias if calls differ",
    source="M-GRPO, 2511.13288, §3",
    setting=(
        "One agent calls another once in half of the episodes and four times in the other half. Each call "
        "contributes its share of the episode's reward, which is inverted with probability 0.2. Groups of 4, "
        "sixteen randomly sampled tasks per step. Noise is measured for the called agent's first update. In the "
        "arms `told`, the called agent observes which case it is in, so calls of the two cases are learned "
        "separately."
    ),
    arms={
        "weights": ("weights", False),
        "none": ("none", False),
        "weights, told": ("weights", True),
        "none, told": ("none", True),
    },
    measure=measure,
    predictions=(
        Prediction(
            "Noise without weights, divided by the noise with weights; by hand 1.43",
            lambda found: found["none"]["noise"] / found["weights"]["noise"],
            at_least=1.2,
            turned=1.0,
        ),
        Prediction(
            "Case observed, with weights: the update's ratio of one call to four calls, divided by the gradient's ratio; by hand 4",
            lambda found: found["weights, told"]["ratio"],
            at_least=3.0,
            turned=1.5,
        ),
        Prediction(
            "Case observed, without weights: the update's ratio of one call to four calls, divided by the gradient's ratio; by hand 1",
            lambda found: found["none, told"]["ratio"],
            at_most=1.3,
        ),
    ),
    plot="bars",
    plotted=("noise", "", "noise of the update, tokens"),
    remark=(
        "With weights the noise is smaller, but by a fifth and not by the factor of 1.43 that was expected. If a "
        "fourth of four calls is correct, an inverted reward varies less (0.25 against 0.39), so episodes with "
        "many calls were less noisy than assumed; the correct calculation gives 1.20. In a first run with four "
        "tasks in groups of 16, the gradient without weights was also biased, 1.30 to 1, because a step with few "
        "tokens gives each token more weight and contains more of the episodes with one call. Only two settings "
        "were changed: sixteen tasks per step, and groups of 4, which keep the number of episodes."
    ),
)
