"""Partial rollouts against waiting for the longest answer, and against dropping what is unfinished."""

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


def measure(arm: tuple[str, float], seed: int, rate: float) -> Result:
    """Let one agent learn that right answers are long; count decode steps, and see what becomes of answers that are longer than needed."""
    algorithm, share = arm
    settings: dict[str, Any] = {
        "name": algorithm,
        "group_size": 4,
        "scale": "none",
        "loss": {"importance_cap": 2.0, "aggregation": "token_mean"},
    }
    over = {"tasks_per_step": 8, "max_staleness": int(share > 0), "partial_rollouts": share}
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
    name="partial_rollouts",
    algorithms=("grpo",),
    claim="Partial rollouts avoid waiting for the longest answer and still learn from long answers, which dropping them would lose",
    source="Kimi k1.5, 2501.12599, §2.6.2 (partial rollouts); APRIL, 2509.18521",
    setting=(
        "One agent writes answers that end after each letter with a chance of 0.1 at first (64 letters at most), and are right from 24 letters on. 4 attempts at each of 8 tasks in a step, 60 steps. With partial rollouts a step ends when all but 2 groups are done, "
        "and those go on in the next one, with the weights of then and truncated importance weights; the ablation lets them go on too and learns nothing from them. A decode step is one letter of every answer that is being written. "
        "Long is the share of right answers that have twice as many letters as needed: 0.08 at first, and nothing that is paid changes it."
    ),
    arms={
        "wait": ("grpo", 0.0),
        "partial": ("grpo", 0.25),
        "drop": ("experiments.ablations:Unfinished", 0.25),
    },
    measure=measure,
    rates=(64.0,),
    quick=2,
    predictions=(
        Prediction(
            "`partial` samples as many letters in a decode step as `wait`, times",
            lambda found: found["partial"]["per_step"] / found["wait"]["per_step"],
            at_least=1.25,
            turned=1.0,
        ),
        Prediction(
            "Return over steps, `wait` less `partial`",
            lambda found: found["wait"]["area"] - found["partial"]["area"],
            at_most=0.03,
        ),
        Prediction(
            "`partial` and `wait` differ in the share of long answers by",
            gap("partial", "wait", "long"),
            at_most=0.06,
        ),
        better("wait", "drop", 0.03, "long", "`drop` has fewer long answers than `wait` by"),
        better("partial", "drop", 0.05, "area", "`partial` is ahead of `drop` by (return over steps)"),
    ),
    plot="bars",
    plotted=("long", "", "share of correct answers that are long"),
    remark=(
        "Dropping pushes answers to end as soon as they are right: those that end then are seen and paid, and those that go on are not, though they would be paid as much. What it costs in worth is smaller than was predicted, since the cut moves along with the answers. "
        "In a first run answers were right from 16 letters on, which is well before a step ends: `partial` sampled 1.38 times as much in a decode step as `wait`, `drop` had a share of long answers smaller by 0.13, and was *ahead* of `partial` in worth by 0.02 (predicted: behind by 0.05), as nothing that was paid was lost by it and, "
        "with a mean over fewer tokens, its steps were larger. The need of 24 letters is the one thing that was changed."
    ),
)
