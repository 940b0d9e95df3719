"""COMA's counterfactual baseline alone, against a central value of the state and against none."""

from __future__ import annotations

from typing import Any

import torch

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import FAR, Anatomy, Arm, TableRun, exact_gradient, moves, recipe_of

AGENTS, GROUP = 4, 8
GAME = {"name": "sum_game", "seats": AGENTS}
WARM, REPEATS = 24, 40


def measure(arm: tuple[dict[str, Any], float, int], seed: int, rate: float) -> Result:
    """Let a critic learn at policies that stay; measure noise and direction of the update after that."""
    algorithm, critic, warm = arm
    recipe = recipe_of(
        GAME, Arm(algorithm), 1.0, seed, optimizer={"critic_lr": critic * FAR} if critic else {}
    )
    run = TableRun(recipe, additive=True)
    exact = exact_gradient(run)
    steps, tokens = zip(*moves(run, warm + REPEATS), strict=True)
    found = Anatomy(
        exact,
        {name: torch.stack([moved[name].detach() for moved in steps[warm:]]) for name in exact},
        tokens[-1] / AGENTS,
    )
    return Result({"noise": found.noise, "cosine": found.cosine})


def noisier(one: str, other: str, by: float, hand: float) -> Prediction:
    """Return the prediction that an arm's update has so many times another's noise."""

    def of(found: Found) -> float:
        return found[one]["noise"] / found[other]["noise"]

    return Prediction(
        f"`{one}` has more noise than `{other}` by (by hand {hand:.2g})", of, at_least=by, turned=1.0
    )


def straight(arm: str) -> Prediction:
    """Return the prediction that an arm's expected update is a multiple of the gradient."""
    return Prediction(
        f"Cosine of `{arm}`'s expected update to the gradient",
        lambda found: found[arm]["cosine"],
        at_least=0.97,
    )


COMA: dict[str, Any] = {"name": "coma", "group_size": GROUP, "normalise": "none"}
MAPPO = {
    "name": "mappo",
    "group_size": GROUP,
    "epochs": 1,
    "gae": {"normalise": "none", "lam": 1.0},
}
CLAIM = Claim(
    name="coma_baseline",
    algorithms=("coma", "mappo"),
    claim="A critic that reads the other agents' actions removes their variance from the update; a critic that reads only the state does not; both are unbiased",
    source="COMA, 1705.08926, §4 and lemma 1",
    setting=(
        "Four agents simultaneously choose one of four letters each; the reward is the share of correct letters. "
        "Groups of 8. The critics, which are sums over turns, have learned for 24 steps on fixed policies, except "
        "in the arm with the critic that is still learning. Noise is the variance of the update divided by its "
        "squared mean, for one sampled letter of each agent. With exact critics, calculation by hand gives 2 with "
        "the counterfactual baseline, 11 with the state's value and 27 without a baseline."
    ),
    arms={
        "coma": (COMA, 1 / AGENTS, WARM),
        "coma, critic still learning": (COMA, 1 / AGENTS, 0),
        "coma, worth: value": ({**COMA, "worth": "value"}, 1 / AGENTS, WARM),
        "mappo": (MAPPO, 0.05, WARM),
        "none": ({"name": "experiments.ablations:Plain", "group_size": GROUP}, 0.0, 0),
    },
    measure=measure,
    predictions=(
        noisier("mappo", "coma", 3.0, 5.5).about("coma", "mappo"),
        noisier("none", "mappo", 1.8, 2.5).about("mappo"),
        noisier("coma", "coma, worth: value", 0.9, 1.0).about("coma"),
        straight("coma").about("coma"),
        straight("coma, critic still learning").about("coma"),
        straight("coma, worth: value").about("coma"),
        straight("mappo").about("mappo"),
        straight("none"),
    ),
    plot="bars",
    plotted=("noise", "", "variance over squared signal"),
    logarithmic=True,
    remark=(
        "The results agree with the calculation, plus a quarter for the mean over seven alternatives that serves "
        "as the baseline. `worth: value` gains nothing over `worth: return` here, because the reward depends on "
        "the letters alone and the counterfactual baseline removes the other agents' part completely. While the "
        "critic is still learning, in the 40 steps from its first, the baseline is less accurate but the update "
        "is equally unbiased. These results are for a critic that adds up its estimates for all turns; a critic "
        "that memorises whole joint answers learns too slowly ([variance and team "
        "size](#variance_and_team_size))."
    ),
)
