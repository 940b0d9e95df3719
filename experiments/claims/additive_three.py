"""Counterfactual credit in a team of three that is paid the sum, beside whole attempts and critics."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Result, better
from experiments.lab import FAR, Arm, TableRun, learn, recipe_of
from kapelle.environments.diagnostics import SumGame

GAME = {"name": "sum_game", "seats": 3}
TOKENS = 250
MANY: dict[str, Any] = {"group_size": 12, "team_reward": "sum"}
FIT = {"updates": 20, "lr": 0.01}
FEW: dict[str, Any] = {"group_size": 4, "team_reward": "sum"}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let the team learn; critics learn at a rate of their own."""
    arm = Arm(algorithm, {"optimizer": {"critic_lr": 0.25 * FAR}})
    curve = learn(TableRun(recipe_of(GAME, arm, rate, seed)), TOKENS)
    return Result({"area": curve.area(TOKENS)}, list(zip(curve.tokens, curve.values, strict=True)))


CLAIM = Claim(
    name="additive_three",
    algorithms=("counterfactual", "ccpo", "sharp"),
    claim="With a summed team reward, counterfactual credit reaches the same return with fewer tokens",
    source="COMA, 1705.08926; CCPO, 2603.21563; SHARP, 2602.08335",
    setting="Three agents say a letter at once; each has one of four to say and earns a third if it does. Twelve attempts a step, or four, which are played on with each turn changed, each agent left out, or each coalition. Continuations count as sampled.",
    arms={
        "grpo": {"name": "grpo", **MANY},
        "rloo, four attempts": {"name": "rloo", **FEW},
        "magrpo": {"name": "magrpo", **MANY},
        "mappo": {"name": "mappo", **MANY},
        "vdn": {"name": "vdn", "group_size": 12, "fit": FIT},
        "qmix": {"name": "qmix", "group_size": 12, "fit": FIT},
        "counterfactual": {"name": "counterfactual", **FEW},
        "ccpo": {"name": "ccpo", **FEW},
        "sharp": {"name": "sharp", **FEW},
    },
    measure=measure,
    rates=(10.0, 30.0, 100.0),
    seeds=20,
    predictions=(
        better("counterfactual", "grpo", 0.01).about("counterfactual"),
        better("counterfactual", "rloo, four attempts", 0.01).about("counterfactual"),
        better("ccpo", "grpo", 0.02).about("ccpo"),
        better("sharp", "grpo", 0.01).about("sharp"),
        better("ccpo", "rloo, four attempts", 0.01).about("ccpo"),
        better("ccpo", "magrpo", 0.02).about("ccpo"),
        better("ccpo", "mappo", 0.02).about("ccpo"),
        better("ccpo", "counterfactual", 0.005).about("ccpo", "counterfactual"),
        better("ccpo", "vdn", 0.02).about("ccpo"),
        better("ccpo", "qmix", 0.02).about("ccpo"),
    ),
    remark="Removing an agent leaves the others' words as they were, so that the difference is exactly what it earned; a word sampled anew brings its own luck. Part of what four attempts gain on twelve is that they are fewer: `counterfactual` is not surely ahead of `rloo` with as many. "
    "Of twenty runs of `grpo`, `magrpo` and `mappo` two to four keep one agent at a wrong letter, of `ccpo` none. `vdn` and `qmix` come to the same: within 250 letters their fits explain nothing that they had not seen, so that both compare returns as they are, and are behind `grpo` in most runs.",
    landmarks=SumGame.model_validate(GAME).landmarks,
)
