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
    claim="Three verifiers are exploited less than one, and their minimum is exploited less than their mean",
    source="reward-model ensembles, 2310.02743; MAPoRL, 2502.18439",
    setting=(
        "As in `fooled_verifier`: the recipe `maporl_sums_debate`, 40 steps, rewarded by a frozen verifier, "
        "without `leash` (KL coefficient 0.002). In `mean` and `least` three verifiers give the reward: the "
        "verifier of `frozen` and two with other seeds, each trained on as many other answers of the same frozen "
        "team. Measured on 200 unseen sums with greedy decoding."
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
        "The two additional verifiers turned out to be poor, which was not known in advance: on 512 answers of "
        "the first step, to 64 sums, the verifier of `frozen` separates correct from incorrect answers with an "
        "AUC of 0.85, and the two others with 0.66 and 0.45, although all have learned from equally many answers "
        "in the same way. The recipe's check (`least_auc` 0.7), which is disabled in all arms here, would test "
        "each of them first. The experiment therefore shows the effect of several verifiers of which one is good, "
        "and not of an ensemble of equals. With their mean, the success on unseen sums was 37, 68 and 61 %; in "
        "two of three seeds this exceeds that of the good verifier alone, 39, 48 and 39 %, and in all seeds it is "
        "below the initial 73.5 %. With their minimum it was 33, 57 and 33 %, because the lowest score counts "
        "even if it is wrong: in every seed this is below the mean. A KL penalty (`leash` in `fooled_verifier`) "
        "ended at 87 % or more."
    ),
    plot="bars",
    plotted=("unseen", "source of the reward", "correct unseen sums"),
)
