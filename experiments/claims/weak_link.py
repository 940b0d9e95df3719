"""A chain with one weak link: does credit find it, at equal tokens?"""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Result, better
from experiments.lab import FAR, Arm, TableRun, learn, recipe_of, relay_start
from kapelle.environments.diagnostics import Relay

GAME = {"name": "relay", "seats": 4, "noise": 0.05}
START = [0.87, 0.1, 0.87, 0.87]
TOKENS = 2000
EIGHT: dict[str, Any] = {"group_size": 8, "team_reward": "sum"}
FOUR: dict[str, Any] = {"group_size": 4, "team_reward": "sum"}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let the chain learn; critics learn at a rate of their own."""
    arm = Arm(algorithm, {"optimizer": {"critic_lr": 0.25 * FAR}})
    recipe = recipe_of(GAME, arm, rate, seed, training={"tasks_per_step": 4})
    curve = learn(TableRun(recipe, relay_start(START)), TOKENS)
    return Result({"area": curve.area(TOKENS)}, list(zip(curve.tokens, curve.values, strict=True)))


CLAIM = Claim(
    name="weak_link",
    algorithms=("c3", "counterfactual", "ccpo"),
    claim="The weak link of a chain improves with fewer tokens where turns are compared, or continued, from one state",
    source="C3, 2603.06859; COMA, 1705.08926; CCPO, 2603.21563",
    setting="Four agents, each of which must say the letter that follows the one before, of four letters. The second does so with a chance of 0.1 at first, the others with 0.87. Each seat's payment is inverted with a chance of 0.05, also that of seats which earn nothing. Four groups a step, of eight attempts, or of four that are played on.",
    arms={
        "grpo": {"name": "grpo", **EIGHT},
        "rloo, four attempts": {"name": "rloo", **FOUR},
        "magrpo": {"name": "magrpo", **EIGHT},
        "mappo": {"name": "mappo", **EIGHT},
        "counterfactual": {"name": "counterfactual", **FOUR},
        "ccpo": {"name": "ccpo", **FOUR},
        "c3": {"name": "c3", "widths": [2, 2, 2, 1], "team_reward": "sum"},
    },
    measure=measure,
    rates=(10.0, 20.0, 30.0),
    seeds=20,
    predictions=(
        better("c3", "grpo", 0.01).about("c3"),
        better("c3", "rloo, four attempts", 0.01).about("c3"),
        better("c3", "magrpo", 0.01).about("c3"),
        better("c3", "mappo", 0.01).about("c3"),
        better("counterfactual", "grpo", 0.01).about("counterfactual"),
        better("ccpo", "grpo", 0.01).about("ccpo"),
    ),
    remark="Playing a turn on draws the luck of all later turns again, and pays for it: in a chain that is worse than comparing whole attempts. `ccpo` goes on without an agent that the chain cannot do without, so that what it subtracts is a constant, for more tokens. `c3` is ahead in most runs, "
    "but three of twenty were misled: all attempts of a tree are played in one world, so that an error in what is paid turns the whole tree round.",
    landmarks=Relay.model_validate(GAME).landmarks,
)
