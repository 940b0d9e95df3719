"""A tiny language model in rock, paper, scissors: latest self-play goes round, the mixtures of fictitious play and PSRO settle."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.claims.league_cycles import FRESH, GAME, TEAM
from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer

STEPS, EVERY = 48, 6
ARMS: dict[str, dict[str, Any]] = {
    "self-play": {"population": "self_play"},
    "fictitious": {"population": "fictitious", **FRESH},
    "PSRO": {"population": "psro", **FRESH},
}


def measure(arm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let one adapter learn both seats; NashConv, by the scored chances of each letter, of snapshots and of their mixture."""
    recipe = {
        "model": {
            "path": "embedded",
            "embedded": {
                "hidden": 32,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "intermediate": 96,
                "context": 64,
            },
        },
        "environment": GAME,
        "workflow": {"name": "play"},
        "team": {**TEAM, "sampling": {"max_tokens": 1, "choices": "legal"}},
        "algorithm": {"name": "grpo", "group_size": 16, "scale": "none", "team_reward": "individual"},
        "league": {"enter": {"every": EVERY}, "keep": STEPS, "slots": STEPS // EVERY, **arm},
        "warmup": {"steps": 100, "demonstrations": 500},
        "optimizer": {"lr": rate, "betas": (0.0, 0.95)},
        "training": {"steps": STEPS, "tasks_per_step": 6},
        "evaluation": None,
        "record": {"credit_episodes": 0},
        "seed": seed,
    }
    newest, mixture = [], []
    with Trainer(resolve(recipe)) as trainer:
        for step in trainer.steps():
            if "league/nash_conv" in step.metrics:
                newest.append(step.metrics["league/nash_conv"])
                mixture.append(step.metrics["league/nash_conv_mixture"])
    return Result({"newest": fmean(newest[len(newest) // 2 :]), "mixture": mixture[-1]})


CLAIM = Claim(
    name="league_cycles_language",
    algorithms=(),
    claim="A language model also cycles in self-play, and the mixtures of fictitious play and PSRO are close to an equilibrium",
    source="fictitious play, Brown 1951; PSRO, 1711.00832, §3; cycles of self-play, 1901.08106, §1",
    setting=(
        "Rock, paper, scissors in which rock beats scissors with double stakes. A tiny language model (two layers "
        "of width 32) answers with one of the three letters; one LoRA adapter plays both roles, for 48 steps of "
        "96 games with GRPO without momentum. Every six steps the adapter enters the pool and restarts from the "
        "weights after the warm-up; in `self-play` it continues. NashConv is exact, computed from the scored "
        "probabilities of the letters: the mean over the snapshots of the second half, and the value for the "
        "mixture of all eight at the end."
    ),
    arms=ARMS,
    measure=measure,
    rates=(2e-3,),
    seeds=10,
    predictions=(
        Prediction(
            "newest snapshot of `self-play`: NashConv",
            lambda found: found["self-play"]["newest"],
            at_least=0.5,
        ),
        Prediction("mixture of `PSRO`: NashConv", lambda found: found["PSRO"]["mixture"], at_most=0.05),
        Prediction(
            "mixture of `fictitious`: NashConv", lambda found: found["fictitious"]["mixture"], at_most=0.25
        ),
    ),
    remark=(
        "Rate and length were chosen with one seed. Only legal letters are sampled (`sampling.choices: legal`). "
        "The NashConv of the mixture of self-play's own snapshots depends on where its cycles happen to end."
    ),
    plot="bars",
    plotted=("mixture", "", "NashConv of the mixture"),
)
