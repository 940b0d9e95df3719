"""A2C's critic against REINFORCE: what it takes out of the update's noise, and at what bias."""

from __future__ import annotations

from typing import Any

import torch

from experiments.claim import Claim, Found, Prediction, Result, better
from experiments.lab import FAR, Anatomy, Arm, TableRun, learn, moves, recipe_of
from kapelle.environments.diagnostics import LongGame

ROUNDS = 8
AT_ONCE = {"name": "long_game", "seats": 1, "rounds": ROUNDS, "rewarded": "at_once"}
AT_THE_END = {**AT_ONCE, "rewarded": "at_the_end"}
ATTEMPTS, TOKENS = 16, 3840
SETTLING, REPEATS = 25, 20
"""Steps for which a critic learns before updates are taken apart, and how many are."""


def run_of(game: dict[str, Any], algorithm: dict[str, Any], rate: float, seed: int) -> TableRun:
    """Return a fresh agent, its critic with a rate of its own."""
    over = {} if algorithm["name"] == "experiments.ablations:Plain" else {"critic_lr": FAR}
    return TableRun(recipe_of(game, Arm(algorithm), rate, seed, optimizer=over))


def measure(arm: tuple[dict[str, Any], dict[str, Any]], seed: int, rate: float) -> Result:
    """Take the update apart at the policy of the start, with a critic that has settled; then let the agent learn."""
    game, algorithm = arm
    found: dict[str, float] = {"area": 0.0}
    if algorithm["name"] != "ppo":  # its four passes move by more than the gradient
        still = run_of(game, algorithm, 1.0, seed)
        gradient = {still.team.trained[0]: by_hand(still)}
        steps = [moved for moved, _ in moves(still, SETTLING + REPEATS)][SETTLING:]
        stacked = {name: torch.stack([each[name] for each in steps]) for name in gradient}
        apart = Anatomy(gradient, stacked, ATTEMPTS * ROUNDS)
        found |= {"noise": apart.noise, "cosine": apart.cosine}
    if game is AT_THE_END:
        return Result(found)
    curve = learn(run_of(game, algorithm, rate, seed), TOKENS)
    found |= {"area": curve.area(TOKENS), "end": curve.end}
    return Result(found, list(zip(curve.tokens, curve.values, strict=True)))


def by_hand(run: TableRun) -> torch.Tensor:
    """Return the gradient of what the agent earns where it says all letters alike: an eighth is earned in each round."""
    gradient = torch.zeros_like(run.engine.weights(run.team.trained[0])["table"], dtype=torch.float64)
    for number in range(ROUNDS):
        row = run.row(f"1/1 {number}")
        gradient[row] -= 1 / 16
        gradient[row, number % 4] += 1 / 4
    return gradient / ROUNDS


def times(one: str, other: str, by: float, hand: float) -> Prediction:
    """Predict how many times another's noise an arm's is."""
    return Prediction(
        f"noise of `{one}` over `{other}`; by hand {hand:g}",
        lambda found: found[one]["noise"] / found[other]["noise"],
        at_least=by,
        turned=1.0,
    )


def cosine(
    arm: str,
    says: str = "",
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    turned: float | None = None,
) -> Prediction:
    """Predict the cosine of an arm's expected update to the gradient."""

    def of(found: Found) -> float:
        return found[arm]["cosine"]

    text = f"cosine of `{arm}`'s expected update to the gradient{says}"
    return Prediction(text, of, at_least=at_least, at_most=at_most, turned=turned)


REINFORCE = {"name": "experiments.ablations:Plain", "group_size": ATTEMPTS}


def a2c(lam: float) -> dict[str, Any]:
    """Return A2C with a λ."""
    return {
        "name": "a2c",
        "group_size": ATTEMPTS,
        "entropy_coefficient": 0.0,
        "gae": {"lam": lam, "normalise": "none"},
    }


CLAIM = Claim(
    name="critic_variance",
    algorithms=("a2c",),
    claim="At λ = 1 a critic removes the variance of earlier rounds; at λ = 0 it also removes that of later rounds, but there an uninformed critic adds bias",
    source="A3C, 1602.01783, §4; GAE, 1506.02438, §3",
    setting=(
        "One agent chooses a letter in each of eight rounds; in each round one of four letters is correct, and "
        "the agent observes only the round. The reward comes immediately or, in two arms, for all rounds at the "
        "end. A step has 16 episodes of the single task. Noise is the number of tokens over which updates must be "
        "averaged until their error is as large as the exact gradient, at the initial policy, after critics have "
        "learned for 25 steps. `reinforce` uses the whole return, and `batch mean` subtracts the mean over the "
        "step. By hand, noise is proportional to 87 for `reinforce`, to 2 + 3·7 = 23 with the batch's mean, to 2 "
        "+ 3·3.5 = 12.5 with λ = 1, and to 2 with λ = 0. If the reward comes at the end, only the last letter has "
        "credit with λ = 0: a cosine of 1/√8. `ppo` makes four passes over each sample."
    ),
    arms={
        "reinforce": (AT_ONCE, REINFORCE),
        "batch mean": (AT_ONCE, {**REINFORCE, "baseline": "batch"}),
        "a2c": (AT_ONCE, a2c(1.0)),
        "a2c, λ = 0": (AT_ONCE, a2c(0.0)),
        "ppo": (
            AT_ONCE,
            {
                "name": "ppo",
                "group_size": ATTEMPTS,
                "epochs": 4,
                "gae": {"lam": 1.0, "normalise": "none"},
            },
        ),
        "a2c, paid at the end": (AT_THE_END, a2c(1.0)),
        "a2c, λ = 0, paid at the end": (AT_THE_END, a2c(0.0)),
    },
    measure=measure,
    rates=(64.0,),
    predictions=(
        times("reinforce", "a2c", 4.0, 7.0),
        times("batch mean", "a2c", 1.4, 1.84),
        times("a2c", "a2c, λ = 0", 4.0, 6.25),
        cosine("a2c", at_least=0.97),
        cosine("a2c, λ = 0", at_least=0.97),
        cosine("a2c, paid at the end", at_least=0.95),
        cosine("a2c, λ = 0, paid at the end", "; by hand 0.354", at_most=0.5, turned=0.9),
        better("a2c", "reinforce", 0.03),
        better("ppo", "a2c", 0.02),
    ),
    landmarks=LongGame.model_validate(AT_ONCE).landmarks,
)
