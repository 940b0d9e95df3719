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
    claim="The weak link of a chain improves with fewer tokens if turns from the same state are compared or continued",
    source="C3, 2603.06859; COMA, 1705.08926; CCPO, 2603.21563",
    setting=(
        "Four agents, each of which must choose, from four letters, the letter that follows the previous agent's "
        "letter. At first the second agent does so with probability 0.1, the others with 0.87. Each agent's "
        "reward, including a reward of 0, is inverted with probability 0.05. A step has four groups of eight "
        "episodes, or of four episodes with continuations."
    ),
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
    remark=(
        "A continuation of a turn samples all later turns again, which adds noise and costs tokens: in a chain "
        "this is worse than comparing whole episodes. `ccpo` continues without an agent on which the chain "
        "depends, so it subtracts a constant and costs more tokens. `c3` is ahead in most runs, but three of "
        "twenty were misled: all episodes of a tree use the same environment seed, so an error in the reward "
        "inverts the whole tree."
    ),
    landmarks=Relay.model_validate(GAME).landmarks,
)
