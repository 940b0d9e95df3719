"""Debaters paid by three verifiers in place of one, by their mean and by the least of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from experiments.claim import Claim, Result, better
from experiments.claims import fooled_verifier
from experiments.running import RUNS
from kapelle.training.trainer import Trainer

VERIFIERS = (0, 1, 2)
"""Seeds of their adapters and heads, and of the questions and answers that they learn from; the first is the one of `fooled_verifier`."""


@cache
def judges() -> list[str]:
    """Return the folders of the verifiers, each trained once as the recipe's first stage does."""
    folders = [fooled_verifier.judge()]
    for seed in VERIFIERS[1:]:
        saved = RUNS / "judges" / str(seed) / "verifier"
        if not saved.exists():
            config = fooled_verifier.stage(
                "judge", f"seed={seed}", "stages.0.evaluation.before_and_after=false"
            )
            with Trainer(config) as trainer:
                trainer.train()
                trainer.save_policies(saved.parent)
        folders.append(str(saved.resolve()))
    return folders


def measure(arm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Let the debaters learn as in `fooled_verifier`, paid by one verifier or by all of them."""
    several = {} if arm["together"] is None else {"verifier": judges(), "together": arm["together"]}
    return fooled_verifier.measure({"algorithm": several}, seed, rate)


CLAIM = Claim(
    name="several_verifiers",
    algorithms=("maporl", "verifier"),
    claim="Three verifiers are exploited less than one, and their minimum less than their mean",
    source="reward-model ensembles, 2310.02743; MAPoRL, 2502.18439",
    setting=(
        "As in `fooled_verifier`: the recipe `maporl_sums_debate`, 40 steps, paid by a frozen verifier, without a leash (KL coefficient 0.002). `mean` and `least` are paid by three, the one of `frozen` and two "
        "of other seeds, which learn from other answers of the same frozen team, as many each. Measured on 200 unseen sums, greedy."
    ),
    arms={"frozen": {"together": None}, "mean": {"together": "mean"}, "least": {"together": "least"}},
    measure=measure,
    predictions=(
        better("mean", "frozen", 0.05, "unseen"),
        better("least", "frozen", 0.1, "unseen"),
        better("least", "mean", 0.02, "unseen"),
    ),
    seeds=3,
    remark=(
        "The further verifiers turned out poor, which was not known before: of 512 answers of the first step, to 64 sums, the one of `frozen` tells right from wrong with an AUC of 0.85, the two others with 0.66 and 0.45, though all have learned from as many answers in the same way. "
        "The recipe's gate (`least_auc` 0.7), which is off in all arms here, would look at each of them first. So this shows what several verifiers do of which one is good, and nothing of an ensemble of equals. Their mean, 37, 68 and 61 % of unseen sums, was ahead of the good one alone, "
        "39, 48 and 39 %, in two seeds of three, and below the 73.5 % with which the team began in all. The least of them, 33, 57 and 33 %, pays by whichever is wrong that way: it was behind the mean in every seed. A KL leash (`fooled_verifier`) ended at 87 % or more."
    ),
    plot="bars",
    plotted=("unseen", "source of the reward", "correct unseen sums"),
)
