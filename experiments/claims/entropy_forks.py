"""A chain with one uncertain link: is a budget of continuations best spent where the policy is uncertain?"""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of, relay_start
from kapelle.environments.diagnostics import Relay

GAME = {"name": "relay", "seats": 4, "noise": 0.05}
START = [0.95, 0.25, 0.95, 0.95]
TOKENS = 2000
FOUR: dict[str, Any] = {"name": "counterfactual", "group_size": 4, "team_reward": "sum"}
BUDGET = 0.75
"""The cost of one continuation of the uncertain turn: three of the four tokens of an episode."""


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let the chain learn."""
    recipe = recipe_of(GAME, Arm(algorithm), rate, seed, training={"tasks_per_step": 4})
    curve = learn(TableRun(recipe, relay_start(START)), TOKENS)
    return Result({"area": curve.area(TOKENS)}, list(zip(curve.tokens, curve.values, strict=True)))


CLAIM = Claim(
    name="entropy_forks",
    algorithms=("counterfactual",),
    claim="Under a budget of tokens, continuations from the turns with the highest policy entropy teach more than other continuations",
    source="2607.14171; 2605.05262",
    setting=(
        "Four agents, each of which must choose, from four letters, the letter that follows the previous agent's "
        "letter. At first the second agent chooses at random, and the others are correct with probability 0.95. Each "
        "agent's reward, including a reward of 0, is inverted with probability 0.05. A step has four groups: of eight "
        "episodes (`rloo`, and `c3` with even widths), or of four episodes with continuations of all turns, or of turns "
        f"within a budget of {BUDGET:g} times the tokens of the episodes, in order of disagreement or of entropy."
    ),
    arms={
        "rloo": {"name": "rloo", "group_size": 8, "team_reward": "sum"},
        "c3": {"name": "c3", "widths": [2, 2, 2, 1], "team_reward": "sum"},
        "all turns": FOUR,
        "disagreement": {**FOUR, "budget": BUDGET},
        "entropy": {**FOUR, "budget": BUDGET, "priority": "entropy"},
    },
    measure=measure,
    rates=(10.0, 20.0, 30.0),
    seeds=12,
    predictions=(
        better("entropy", "all turns", 0.01),
        better("entropy", "disagreement", 0.01),
        better("entropy", "c3", 0.01),
        better("entropy", "rloo", 0.01),
    ),
    remark=(
        "A budget helps: continuations of all turns cost more than twice as many tokens as the episodes. With the budget, the "
        "order of entropy is not better in the median than the order of disagreement (both 0.92), than `c3` with even widths "
        "(0.935), or than twice as many episodes without continuations (`rloo`, 0.924). The worst of twelve runs differ: "
        "0.87 with entropy, 0.28 with disagreement and 0.58 with `c3`. No bound for the worst run was fixed before the runs, "
        "so this is an observation. Only three other episodes estimate the entropy, so an unlikely letter of a certain agent "
        "often takes the budget. All arms take the largest learning rate that was tried."
    ),
    landmarks=Relay.model_validate(GAME).landmarks,
)
