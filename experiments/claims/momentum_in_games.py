"""Adam with and without momentum, where two players learn against each other."""

from __future__ import annotations

from itertools import product
from typing import Any

from experiments.claim import Claim, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of

LETTERS = "RPS"
WINS = {"RS": 2.0, "PR": 1.0, "SP": 1.0}
"""What the first player wins; the equilibrium draws R, P and S with 1/4, 1/2 and 1/4."""
STEPS, GAMES = 150, 32
TOKENS = STEPS * GAMES * 2


def game() -> dict[str, Any]:
    """Return rock, paper, scissors in which a rock wins 2."""
    paid = {a + b: WINS.get(a + b, 0.0) - WINS.get(b + a, 0.0) for a, b in product(LETTERS, repeat=2)}
    payoffs = {joint: (won, -won) for joint, won in paid.items()}
    return {"name": "matrix", "game": "custom", "rules": "none", "payoffs": payoffs}


def nash_conv(run: TableRun) -> float:
    """Return what both players together could gain by deviating."""
    gains = 0.0
    for seat in (0, 1):
        other = {letter: run.likes(1 - seat, letter) for letter in LETTERS}
        gains += max(
            sum(
                chance * (WINS.get(own + letter, 0.0) - WINS.get(letter + own, 0.0))
                for letter, chance in other.items()
            )
            for own in LETTERS
        )
    return gains  # what one wins the other loses: the returns add up to 0


EVEN = 2 * (2.0 - 1.0) / 3
"""NashConv of two who draw evenly: a rock wins 2 and loses 1."""


def measure(betas: tuple[float, float], seed: int, rate: float) -> Result:
    """Let two tables learn against each other; measure by how much less exploitable they are than even play."""
    learns = Arm(
        {
            "name": "grpo",
            "group_size": GAMES,
            "team_reward": "individual",
            "scale": "none",
            "loss": {"entropy_coefficient": 0.2},
        }
    )
    recipe = recipe_of(game(), learns, rate, seed)
    recipe["optimizer"] = {"lr": rate, "betas": betas, "max_grad_norm": None}
    # Both begin near a corner, as a warmed-up model does.
    run = TableRun(recipe, lambda seen: {"P": -2.0})
    curve = learn(run, TOKENS, 3, lambda run: 1.0 - nash_conv(run) / EVEN)
    later = curve.values[len(curve.values) // 2 :]
    return Result({"later": sum(later) / len(later)}, list(zip(curve.tokens, curve.values, strict=True)))


NONE, MOMENTUM = (0.0, 0.95), (0.9, 0.95)
CLAIM = Claim(
    name="momentum_in_games",
    algorithms=("grpo", "rae", "mars"),
    claim="If two players learn against each other, momentum prevents convergence to the regularised equilibrium",
    source="momentum in games, 1807.04740",
    setting=(
        "Two tables play rock, paper, scissors in which a win with rock counts 2, with 32 games per step, from a "
        "start that hardly ever chooses paper; the equilibrium chooses it half of the time. Adam with β₁ = 0.9 or "
        "0, and an entropy bonus of 0.2, each at its best learning rate. The curve is 1 − NashConv divided by "
        "that of the uniform policy: 1 at the equilibrium, 0 for the uniform policy."
    ),
    arms={
        "no momentum": NONE,
        "momentum": MOMENTUM,
    },
    measure=measure,
    rates=(0.01, 0.03, 0.1, 0.3),
    predictions=(better("no momentum", "momentum", 0.1, "later"),),
    chosen_by="later",
    plotted=("later", "", "1 − NashConv / uniform policy's"),
    remark=(
        "An arm without entropy was planned as well, and it was omitted for its cost before any result was "
        "judged; one seed of both arms was used first to choose the rates. With exact gradients the result is the "
        "same: [why self-play circles](explanations/self_play.md)."
    ),
)
