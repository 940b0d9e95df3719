"""Optimistic credit in the climbing game, and in a bet."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, learn, recipe_of

TOKENS = 1200
CLIMBING = {"name": "matrix", "game": "climbing", "rules": "none"}
BET = {
    "name": "matrix",
    "game": "custom",
    "rules": "none",
    "payoffs": {"AA": 1.0, "AB": 1.0, "BA": 3.0, "BB": -3.0},
}
COIN = [{"name": "agent_0"}, {"name": "agent_1", "weights": "frozen"}]


def measure(arm: tuple[str, dict[str, Any]], seed: int, rate: float) -> Result:
    """Let both seats learn the climbing game, or one of them against a coin."""
    game, algorithm = arm
    if game == "bet":
        run = TableRun(recipe_of(BET, Arm(algorithm, {"team": {"agents": COIN}}), rate, seed))
        curve = learn(run, TOKENS, 4, lambda run: run.likes(0, "A"))
    else:
        run = TableRun(recipe_of(CLIMBING, Arm(algorithm), rate, seed))
        curve = learn(run, TOKENS, 4, lambda run: run.likes(0, "A") * run.likes(1, "A"))
    return Result(
        {"area": curve.area(TOKENS), "end": curve.end},
        list(zip(curve.tokens, curve.values, strict=True)),
    )


def at_the_end(
    arm: str, says: str, at_least: float | None = None, at_most: float | None = None
) -> Prediction:
    """Predict a chance at the end."""

    def of(found: Found) -> float:
        return found[arm]["end"]

    return Prediction(says, of, at_least=at_least, at_most=at_most)


BEST: dict[str, Any] = {"name": "optimistic", "group_size": 16}
MEAN: dict[str, Any] = {"name": "optimistic", "group_size": 16, "best_share": 1.0}
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 16}

CLAIM = Claim(
    name="optimism",
    algorithms=("optimistic",),
    claim="Optimistic credit finds an optimum that is surrounded by losses, but it also prefers risky bets with a lower mean",
    source="Lauer and Riedmiller, ICML 2000; Panait, Sullivan and Luke, AAMAS 2006",
    setting=(
        "The climbing game, whose optimum has reward 11 and lies next to a loss of 30; and, for one agent, a "
        "choice between a safe reward of 1 and a bet of 3 or −3 on a frozen agent's coin. Sixteen episodes per "
        "step. The curve is the probability of the optimum, or of the safe 1. `mean` is the same algorithm with "
        "credit from all episodes."
    ),
    arms={
        "best tenth, climbing": ("climbing", BEST),
        "mean, climbing": ("climbing", MEAN),
        "grpo, climbing": ("climbing", GRPO),
        "best tenth, bet": ("bet", BEST),
        "mean, bet": ("bet", MEAN),
        "grpo, bet": ("bet", GRPO),
    },
    measure=measure,
    quick=2,
    rates=(0.3, 1.0),
    predictions=(
        at_the_end(
            "best tenth, climbing", "climbing: probability of the optimum with the best tenth", at_least=0.9
        ),
        at_the_end("mean, climbing", "climbing: probability of the optimum with the mean", at_most=0.1),
        at_the_end("grpo, climbing", "climbing: probability of the optimum with `grpo`", at_most=0.1),
        at_the_end("best tenth, bet", "bet: probability of the safe 1 with the best tenth", at_most=0.1),
        at_the_end("mean, bet", "bet: probability of the safe 1 with the mean", at_least=0.9),
        at_the_end("grpo, bet", "bet: probability of the safe 1 with `grpo`", at_least=0.9),
    ),
    plotted=("end", "", "probability of the optimum, or of the safe 1"),
    remark=(
        "In the repetition, the wider grid decides: where learning leads away from the optimum or the safe 1, the "
        "least rate of the grid is best (0.0081), at which hardly anything is learned in 1200 tokens, so that the "
        "probabilities stay near chance (1/9 and 1/2). The best tenth takes the greatest rate (37), which is a "
        "gamble: eight of ten seeds end at 1 and two at 0. The five seeds of the sweep all ended at 1."
    ),
)
