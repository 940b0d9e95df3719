"""GRPO's group baseline against a batch's mean and against none."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import Arm, TableRun, anatomy, learn, recipe_of
from kapelle.environments.diagnostics import Unequal

GAME = {
    "name": "unequal",
    "seats": 1,
    "letters": 12,
    "right_letters": (1, 1, 1, 1),
    "anyway": (0.0, 0.3, 0.6, 0.9),
}
TOKENS = 2000


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure the noise of the first update, and let one agent learn four tasks that pay unequally for nothing."""
    recipe = recipe_of(GAME, Arm(algorithm), rate, seed, training={"tasks_per_step": 4})
    curve = learn(TableRun(recipe), TOKENS, every=2)
    return Result(
        {"area": curve.area(TOKENS), "noise": anatomy(TableRun(recipe), 60).noise},
        list(zip(curve.tokens, curve.values, strict=True)),
    )


def noisier(arm: str, by: float) -> Prediction:
    """Return the prediction that an arm's update has so many times the group's noise."""
    return Prediction(
        f"the first update of `{arm}` has {by:g} times the noise of `group`",
        lambda found: found[arm]["noise"] / found["group"]["noise"],
        at_least=by,
        turned=1.0,
    )


CLAIM = Claim(
    name="group_baseline",
    algorithms=("grpo",),
    claim="A baseline from the same task's group gives less variance than a batch mean or no baseline",
    source="DeepSeekMath, 2402.03300, §4.1",
    setting=(
        "One agent, four tasks of twelve letters of which one is correct; the tasks also give constant rewards of "
        "0, 0.3, 0.6 and 0.9. A step has 8 episodes for each of four randomly sampled tasks. Noise is the "
        "variance of the update divided by its squared mean, in sampled tokens; by simulation it is 71 for the "
        "group, 7.5 times as large without a baseline and 2.4 times as large with the batch's mean."
    ),
    arms={
        "group": {"name": "grpo", "group_size": 8, "scale": "none"},
        "batch": {"name": "experiments.ablations:Plain", "group_size": 8, "baseline": "batch"},
        "none": {"name": "experiments.ablations:Plain", "group_size": 8},
    },
    measure=measure,
    rates=(16.0, 64.0, 256.0),
    predictions=(
        noisier("batch", 2.0),
        noisier("none", 6.0),
        better("group", "none", 0.03),
    ),
    remark=(
        "With the batch's mean the agent learns nearly as fast (0.959 against 0.972): in a table every task has "
        "its own rows, so noise from other tasks does no harm unless rates are high. Without a baseline every "
        "sampled letter gains probability, and at rates that would find the correct letter in time the policy "
        "converges to an incorrect letter first."
    ),
    landmarks=Unequal.model_validate(GAME).landmarks,
)
