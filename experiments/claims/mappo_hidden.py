"""A central critic against local ones where half of what is earned is hidden from an agent."""

from __future__ import annotations

from typing import Any

import torch

from experiments.claim import Claim, Found, Prediction, Result, better
from experiments.lab import FAR, Arm, TableRun, learn, moves, recipe_of

GAME = {"name": "hidden_sign", "seats": 4}
TOKENS = 1200
SETTLING, REPEATS = 15, 15
SIGHTLESS = "agent_3"


def run_of(algorithm: dict[str, Any], seed: int, rate: float) -> TableRun:
    """Return a fresh team that plays both cases in every step, its critics with a rate of their own."""
    return TableRun(
        recipe_of(
            GAME,
            Arm(algorithm, {} if algorithm["name"] == "grpo" else {"team": {"critic_sharing": "own"}}),
            rate,
            seed,
            training={"tasks_per_step": 2},
            optimizer={"critic_lr": 0.2 * FAR},
        )
    )


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure how noisy the update of the agent is that does not see the sign, and let the team learn."""
    still = run_of(algorithm, seed, 1.0)
    steps = [moved[SIGHTLESS].detach() for moved, _ in moves(still, SETTLING + REPEATS)][SETTLING:]
    moved = torch.stack(steps)
    # A group's mean takes a fourth of the update with it.
    shrunk = 0.75 if algorithm["name"] == "grpo" else 1.0
    curve = learn(run_of(algorithm, seed, rate), TOKENS)
    return Result(
        {
            "noise": float(moved.var(0).sum()) / shrunk**2,
            "area": curve.area(TOKENS),
            "end": curve.end,
        },
        list(zip(curve.tokens, curve.values, strict=True)),
    )


def noisier(one: str, other: str) -> Any:
    """Return by what an arm's update is noisier than another's."""

    def of(found: Found) -> float:
        return found[one]["noise"] / found[other]["noise"]

    return of


UNSCALED = {"group_size": 4, "epochs": 1, "gae": {"normalise": "none", "lam": 1.0}}
CLAIM = Claim(
    name="mappo_hidden",
    algorithms=("mappo", "ippo"),
    claim="A central critic explains state that an agent cannot observe, which lowers the variance and speeds up learning",
    source="MAPPO, 2103.01955, §4",
    setting=(
        "Four agents choose one of four letters each; half of the reward is for correct letters, and the other "
        "half is a gift that is either given or not; only the first agent observes which. Every step has 4 "
        "episodes of each case. Each agent has its own critic, so the critics differ only in what they read. The "
        "noise is the variance of the last agent's update at the initial policies, after critics have learned for "
        "15 steps."
    ),
    arms={
        "mappo": {"name": "mappo", **UNSCALED},
        "ippo": {"name": "ippo", **UNSCALED},
        "grpo": {"name": "grpo", "scale": "none", "group_size": 4},
    },
    measure=measure,
    predictions=(
        Prediction(
            "noise of `ippo`'s update, divided by that of `mappo`", noisier("ippo", "mappo"), at_least=2.5
        ),
        Prediction(
            "noise of `grpo`'s update, divided by that of `mappo`", noisier("grpo", "mappo"), at_most=2.0
        ),
        better("mappo", "ippo", 0.02),
    ),
    rates=(16.0, 32.0, 64.0),
    remark=(
        "By hand, the gift contributes 0.0625 to the variance of the return and all letters together 0.0117, so "
        "`ippo` should be 6.3 times as noisy. An effect on learning is not shown: the returns over tokens are "
        "equal within 0.01, also with two agents, where the noise was 4.8 times as large. `grpo`, whose baseline "
        "comes from the same step, is ahead of both. A possible reason is that critics follow the policies late, "
        "and that a central critic sees each of its states half as often as a local critic that cannot "
        "distinguish them. If each task is sampled several times, a group's mean removes the gift as well as a "
        "central critic does."
    ),
)
