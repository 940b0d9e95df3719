"""Debaters paid by a verifier that they learn to fool, and what keeps it from being fooled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from experiments.claim import Claim, Found, Prediction, Result, better
from experiments.running import RUNS
from kapelle.features.warmup.stage import warmed_up
from kapelle.rows import turns_of
from kapelle.settings.schema import RunConfig
from kapelle.setup.recipe import load_stages
from kapelle.training.trainer import Trainer

RECIPE = "maporl_sums_debate"
UNSEEN = 200
"""Sums of the test split that the team answers in the end."""
LAST = 5
"""Steps over which the verifier is measured on what the team says."""


def stage(name: str, *settings: str) -> RunConfig:
    """Return a stage of the recipe; its warm-up is the one of seed 0, whatever the stage's own seed."""
    config = dict(load_stages(RECIPE, (), settings))[name].config
    base = warmed_up(config.model_copy(update={"seed": 0}))
    model = config.model.model_copy(update={"path": str(base)})
    return config.model_copy(update={"model": model, "warmup": None})


@cache
def judge() -> str:
    """Return the folder of the verifier that the recipe's first stage trains; trained once."""
    saved = RUNS / "judges" / "0" / "verifier"
    if not saved.exists():
        with Trainer(stage("judge", "stages.0.evaluation.before_and_after=false")) as trainer:
            trainer.train()
            trainer.save_policies(saved.parent)
    return str(saved.resolve())


@cache
def began() -> float:
    """Return the share of unseen sums that the team gets right after its warm-up; an adapter changes nothing at first."""
    with Trainer(stage("debate")) as trainer:
        success = trainer.evaluate(UNSEEN).success
    assert success is not None
    return success


def measure(arm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Let the recipe's debaters learn for 40 steps, and measure them and who pays them."""
    del rate  # the recipe's
    judged = "algorithm" in arm
    algorithm = {
        "verifier": judge() if judged else None,
        "least_auc": None,
        "refresh": None,
        "loss": {"kl_coefficient": 0.002},
        **arm.get("algorithm", {}),
    }
    config = stage(
        "debate",
        f"seed={100 + seed}",
        f"stages.1.training.tasks_per_step={arm.get('tasks', 16)}",
        *(f"stages.1.algorithm.{key}={json.dumps(value)}" for key, value in algorithm.items()),
    )
    with Trainer(config) as trainer:
        labels, rows = 0.0, []
        for step in trainer.steps():
            rows.append(step.metrics)
            if not judged:
                labels += len(turns_of(step.groups, trained_only=False))
        ended = trainer.evaluate(UNSEEN).success
    assert ended is not None
    measures = {"began": began(), "unseen": ended, "labels": rows[-1].get("verifier_labels", labels)}
    if judged:
        measures["auc"] = _last(rows, "verifier_auc")
        measures["paid"] = fmean(_last(rows, f"verifier_score/{agent}") for agent in ("ada", "ben"))
        measures["paid at first"] = fmean(rows[0][f"verifier_score/{agent}"] for agent in ("ada", "ben"))
        measures["auc at first"] = rows[0]["verifier_auc"]
    return Result(measures)


def _last(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return fmean(row[name] for row in rows[-LAST:] if name in row)


def lost(found: Found) -> float:
    """Return what the team has lost that a frozen verifier paid."""
    return found["frozen"]["began"] - found["frozen"]["unseen"]


CLAIM = Claim(
    name="fooled_verifier",
    algorithms=("maporl", "verifier"),
    claim="Policies exploit a verifier that is trained only once; fresh labels prevent this, and they are more useful for the verifier than as direct rewards",
    source="reward over-optimisation, 2210.10760; MAPoRL, 2502.18439",
    setting=(
        "The recipe `maporl_sums_debate`: two debaters of the tiny language model, two rounds, 40 steps of 16 "
        "sums, 128 answers per step. The verifier has learned from 143,360 graded answers of the frozen team. "
        "`refresh`: this share of each step's answers is graded, and the verifier learns from them. `leash`: a KL "
        "coefficient of 0.2 in place of 0.002. `few`: no verifier; the environment rewards two sums per step, "
        "which takes 640 grades (`refresh 0.1` takes 520). `true`: the environment rewards all 5,120 answers. "
        "Measured on 200 unseen sums with greedy decoding."
    ),
    arms={
        "true": {},
        "few": {"tasks": 2},
        "frozen": {"algorithm": {}},
        "refresh 0.1": {"algorithm": {"refresh": {"share": 0.1, "lr": 2e-4}}},
        "refresh 0.5": {"algorithm": {"refresh": {"share": 0.5, "lr": 5e-4, "updates": 8}}},
        "leash": {"algorithm": {"loss": {"kl_coefficient": 0.2}}},
    },
    measure=measure,
    predictions=(
        Prediction(
            "decline of the team's success when the frozen verifier rewards it",
            lost,
            at_least=0.05,
            turned=0.0,
        ),
        better("refresh 0.1", "frozen", 0.1, "unseen"),
        better("refresh 0.5", "frozen", 0.2, "unseen"),
        Prediction(
            "`refresh 0.5` ends within 0.1 of `true`",
            lambda found: found["true"]["unseen"] - found["refresh 0.5"]["unseen"],
            at_most=0.1,
        ),
        better("leash", "frozen", 0.1, "unseen"),
        better("refresh 0.1", "few", 0.02, "unseen"),
    ),
    seeds=3,
    remark=(
        "Three seeds of the debate, but only one warm-up and one verifier, because a run of the language model "
        "takes minutes; the results are therefore shown for this verifier only. Rate and updates of `refresh` "
        "were chosen with another seed; the KL coefficient of `leash` was not tuned. The contradicted part is "
        "that labels are more useful for the verifier: 640 grades as direct rewards teach more than 520 grades "
        "that refresh the verifier. The verifier had learned from 143,360 grades, and 13 more per step are few in "
        "comparison. `leash` needs no grades. Three verifiers in place of one, two of which were poor, did not "
        "prevent the decline (`several_verifiers`)."
    ),
    plot="bars",
    plotted=("unseen", "source of the reward", "correct unseen sums"),
)
