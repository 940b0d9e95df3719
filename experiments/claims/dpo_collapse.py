"""DPO's chosen answers become less likely, and what holds them up."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Found, Prediction, Result
from kapelle.training.trainer import Trainer

STEPS, LAST = 36, 8
RECIPE: dict[str, Any] = {
    "model": {"embedded": {"hidden": 48, "layers": 2, "intermediate": 128, "context": 64}},
    "team": {
        "lora": {"rank": 16, "alpha": 32.0},
        "sampling": {"max_tokens": 4},
        "agents": [{"name": "solver"}],
    },
    "environment": {"name": "arithmetic", "operators": ["+"], "carry_share": 1.0, "flaws": {"solver": 0.5}},
    "workflow": {"name": "solo"},
    "warmup": {"steps": 220, "demonstrations": 4000},
    "training": {"steps": STEPS, "tasks_per_step": 24},
    "evaluation": {"problems": 200},
}
DPO: dict[str, Any] = {"name": "dpo", "data": "recorded", "group_size": 4, "beta": 0.1}


def measure(algorithm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let a small language model learn from pairs, right sum over wrong one; log-probs are per token, at first and in the last steps."""
    recipe = {**RECIPE, "algorithm": algorithm, "optimizer": {"lr": rate}, "seed": seed}
    with Trainer(**recipe) as run:
        rows = [step.metrics for step in run.steps()]
        right = run.evaluate().success
    assert right is not None
    names = ("chosen_logp", "rejected_logp", "preference_accuracy")
    found = {name: sum(row[f"{name}/solver"] for row in rows[-LAST:]) / LAST for name in names}
    return Result({"right": right, "chosen before": rows[0]["chosen_logp/solver"], **found})


def gain(arm: str) -> Prediction:
    """Return the prediction that an arm's chosen answers end at least as likely as they began."""

    def of(found: Found) -> float:
        return found[arm]["chosen_logp"] - found[arm]["chosen before"]

    return Prediction(f"`{arm}`: log-prob of a chosen token, gained", of, at_least=-0.05, turned=-0.3)


CLAIM = Claim(
    name="dpo_collapse",
    algorithms=("dpo",),
    claim="DPO lowers the likelihood of the chosen answers, and the model forgets; a likelihood term for the chosen answers prevents this",
    source="2410.08847, §4 (collapse); 2404.19733, §3.3 (the term)",
    setting=(
        "A language model of two layers adds two numbers of two digits with a carry. It was first trained on sums "
        "of which half omit the carry. It then learns from pairs of the correct sum and the sum without the "
        "carry, which differ in one digit: 24 problems in each of 36 steps. `right` is the share of correct sums "
        "on 200 unseen problems with greedy decoding."
    ),
    arms={
        "DPO": DPO,
        "DPO, β 0.5": {**DPO, "beta": 0.5},
        "DPO and likelihood": {**DPO, "nll": 1.0},
        "likelihood alone": {**DPO, "beta": 1e-4, "nll": 1.0},
    },
    measure=measure,
    rates=(3e-4,),
    predictions=(
        Prediction(
            "`DPO`: change in the log-prob of a chosen token",
            lambda found: found["DPO"]["chosen_logp"] - found["DPO"]["chosen before"],
            at_most=-0.3,
            turned=0.0,
        ),
        Prediction(
            "`DPO`: share of pairs with the correct preference",
            lambda found: found["DPO"]["preference_accuracy"],
            at_least=0.9,
        ),
        gain("DPO and likelihood"),
        Prediction(
            "`DPO and likelihood` minus `DPO`: share of correct sums",
            lambda found: found["DPO and likelihood"]["right"] - found["DPO"]["right"],
            at_least=0.1,
            turned=0.0,
        ),
        Prediction(
            "`DPO and likelihood`: share of pairs with the correct preference",
            lambda found: found["DPO and likelihood"]["preference_accuracy"],
            at_least=0.9,
        ),
    ),
    remark=(
        "The likelihood term alone works equally well: the remedy is that the chosen answers are imitated, and on "
        "these pairs the preference loss adds a wider margin but no correct sums. A larger β slows the fall of "
        "the likelihood but does not stop it. The prediction that is not shown concerns plain DPO and is not "
        "needed for the claim: its likelihood falls so far that it is not certain to prefer the correct answer in "
        "nine of ten pairs, which it does with the term. With 25 steps in place of 36 the result was the same "
        "(0.922 [0.899, 0.936])."
    ),
    plot="bars",
    plotted=("right", "", "correct sums, unseen problems"),
)
