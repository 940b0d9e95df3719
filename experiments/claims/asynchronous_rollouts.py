"""Sampling without interruption against waiting for the longest answer, and against dropping what is unfinished."""

from __future__ import annotations

import math
from typing import Any, cast

from experiments.claim import Claim, Found, Prediction, Result, better
from experiments.lab import Arm, TableRun, recipe_of, tokens_of
from experiments.tables import SteppedTables
from kapelle.types import Message

GAME = {"name": "essay", "seats": 1, "letters": 2, "place": 23, "longest": 64}
LONG = 48
STEPS = 60
END = 0.1
"""Chance with which an answer ends after a letter at first."""


def start(seen: str) -> dict[str, float]:
    """Say `A` and hardly ever `B`; end with a chance of a tenth."""
    return {"B": -12.0, "": math.log(END / (1 - END))}


def reaches(run: TableRun, letters: int) -> float:
    """Return the chance of an answer of so many letters `A` or more."""
    begun = run.renderer.start([Message("user", "1/1")])
    chance = 1.0
    for length in range(letters):
        chance *= run.player.chances(run.team.trained[0], (*begun, *[0] * length))[0][0]
    return chance


def measure(arm: tuple[str, bool], seed: int, rate: float) -> Result:
    """Let one agent learn that right answers are long; count decode steps, and see what becomes of answers that are longer than needed."""
    algorithm, asynchronous = arm
    settings: dict[str, Any] = {
        "name": algorithm,
        "group_size": 4,
        "scale": "none",
        "loss": {"importance_cap": 2.0, "aggregation": "token_mean"},
    }
    over = {
        "tasks_per_step": 8,
        "max_staleness": 2 * asynchronous,
        "asynchronous": asynchronous,
        "steps": STEPS,
    }
    run = TableRun(recipe_of(GAME, Arm(settings), rate, seed, training=over), start, stepped=True)
    tokens = 0
    worth = [reaches(run, 24)]
    for _ in range(STEPS):
        groups, _ = run.step()
        tokens += tokens_of(groups)
        worth.append(reaches(run, 24))
    steps = cast("SteppedTables", run.player).steps
    return Result(
        {
            "area": sum(worth) / len(worth),
            "end": worth[-1],
            "steps": steps / STEPS,
            "per_step": tokens / steps,
            "long": reaches(run, LONG) / worth[-1],
        }
    )


def gap(one: str, other: str, measure: str) -> Any:
    """Return by how much two arms differ in a measure, in either direction."""

    def of(found: Found) -> float:
        return abs(found[one][measure] - found[other][measure])

    return of


CLAIM = Claim(
    name="asynchronous_rollouts",
    algorithms=("grpo",),
    claim="Sampling without interruption avoids waiting for the longest answer and still learns from long answers, which are lost if answers that continue with new weights are dropped",
    source="AReaL, 2505.24298, §4 (interruptible rollouts, bounded staleness); Kimi k1.5, 2501.12599, §2.6.2; APRIL, 2509.18521",
    setting=(
        "One agent writes answers that at first end after each letter with probability 0.1 (64 letters at most) "
        "and that are correct if they have at least 24 letters. A step has 4 episodes for each of 8 tasks; 60 "
        "steps. With `asynchronous` (`training.asynchronous`, `max_staleness: 2`) a step takes the first 8 complete "
        "groups, 16 groups are sampled at once, and unfinished answers continue with the new weights and truncated "
        "importance weights. An update takes no decode steps. The ablation `drop` does not learn from groups that "
        "continued with new weights. A decode step is one letter for every active answer. "
        "`long` is the share of correct answers that have at least twice as many letters as needed: 0.08 at "
        "first, and no reward depends on it."
    ),
    arms={
        "wait": ("grpo", False),
        "asynchronous": ("grpo", True),
        "drop": ("experiments.ablations:Unfinished", True),
    },
    measure=measure,
    rates=(64.0,),
    quick=2,
    predictions=(
        Prediction(
            "letters per decode step, `asynchronous` divided by `wait`",
            lambda found: found["asynchronous"]["per_step"] / found["wait"]["per_step"],
            at_least=1.25,
            turned=1.0,
        ),
        Prediction(
            "return over steps, `wait` minus `asynchronous`",
            lambda found: found["wait"]["area"] - found["asynchronous"]["area"],
            at_most=0.03,
        ),
        Prediction(
            "difference in the share of long answers between `asynchronous` and `wait`",
            gap("asynchronous", "wait", "long"),
            at_most=0.06,
        ),
        better("wait", "drop", 0.03, "long", "share of long answers, `wait` minus `drop`"),
        better("asynchronous", "drop", 0.05, "area", "return over steps, `asynchronous` minus `drop`"),
    ),
    plot="bars",
    plotted=("long", "", "share of correct answers that are long"),
)
