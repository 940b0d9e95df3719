"""Distillation on the team's own samples against fine-tuning on demonstrations, beside a team-mate that errs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of, relay_start
from experiments.relays import ShownRelay

SEATS = 4
ERRS = 0.5
RIGHT = 0.97
TOKENS = 4000
STUDENTS = tuple(range(1, SEATS))
GAME = {"name": ShownRelay.model_fields["name"].default, "seats": SEATS}


def start(seen: str) -> Mapping[str, float]:
    """Return the start of a first seat that errs and of students that say anything."""
    return {"A": math.log((1 - ERRS) * 3 / ERRS)} if seen.startswith("1/") else {}


def follows(run: TableRun) -> float:
    """Return how often a student says the letter that follows the one that it hears, beside the mate that errs."""
    letters = run.renderer.alphabet
    new_messages = dict(run.say(0, f"1/{SEATS}"))
    total = 0.0
    for seat in STUDENTS:
        said = dict.fromkeys(letters, 0.0)
        for k, letter in enumerate(letters):
            own = run.say(seat, f"{seat + 1}/{SEATS} {letter}")
            total += new_messages[letter] * own[letters[(k + 1) % len(letters)]]
            for text, chance in own.items():
                said[text] += new_messages[letter] * chance
        new_messages = said
    return total / len(STUDENTS)


@dataclass(frozen=True)
class Lesson:
    """How students are taught."""

    algorithm: Mapping[str, Any]
    errs: float = 0.0
    """How often the first seat errs in what is demonstrated."""


def measure(lesson: Lesson, seed: int, rate: float) -> Result:
    """Teach the students; look at them beside the mate that errs."""
    agents: list[dict[str, Any]] = [{"name": "agent_0", "weights": "frozen"}]
    agents += [{"name": f"agent_{k}"} for k in STUDENTS]
    arm = Arm(lesson.algorithm, {"team": {"agents": agents}, "environment": {"errs": lesson.errs}})
    recipe = recipe_of(GAME, arm, rate, seed, training={"tasks_per_step": 8})
    run = TableRun(recipe, start, teacher=relay_start([RIGHT] * SEATS))
    curve = learn(run, TOKENS, every=2, worth=follows)
    return Result(
        {"area": curve.area(TOKENS), "end": curve.end},
        list(zip(curve.tokens, curve.values, strict=True)),
    )


CLAIM = Claim(
    name="distill_own_samples",
    algorithms=("distill", "sft"),
    claim="Distillation on the team's own samples teaches recovery from a team-mate's error; demonstrations teach it where they contain such errors",
    source="GKD, 2306.13649, §3",
    setting="A chain of four, of which the first, a frozen team-mate, says a wrong letter half of the time; the others should say the letter that follows the one they hear, whatever it is, and begin by chance. "
    "Drawn is how often they do, exactly. The teacher of `distill` says the right letter with 0.97; demonstrations are right always, of a team whose first seat is right too, or errs as the mate does.",
    arms={
        "distill": Lesson({"name": "distill", "teacher": "teacher", "group_size": 4}),
        "sft, a team without errors": Lesson({"name": "sft"}),
        "sft, beside the mate that errs": Lesson({"name": "sft"}, ERRS),
    },
    measure=measure,
    predictions=(
        better(
            "distill",
            "sft, a team without errors",
            0.2,
            "end",
            "The students follow more often in the end with `distill` than from demonstrations without errors; by hand by 0.26",
        ),
        Prediction(
            "From demonstrations without errors they follow in 0.71, by hand: after an error the second is correct by chance",
            lambda found: found["sft, a team without errors"]["end"],
            at_most=0.73,
            turned=0.9,
        ),
        better(
            "sft, beside the mate that errs",
            "distill",
            0.0,
            "area",
            "Demonstrations beside the mate that errs teach no more slowly than `distill`",
        ),
    ),
    rates=(4.0, 16.0, 64.0, 256.0),
    landmarks=lambda: {"the teacher": RIGHT, "chance": 0.25},
    remark="What counts is which letters are heard while they learn. A table says of a letter that it has never heard what it said at first; a language model guesses, better or worse. "
    "Where the expert can be asked beside the real team, its demonstrations teach faster than a teacher's log-probs of one sampled letter; own samples need no expert that plays along, and follow the team where its errors change. "
    "The best rates lie at the edge of the grid, and matter little: from 16 to 256 no arm's area changes by more than 0.016. At 256 students settle on the teacher's likeliest letter, so that they follow in more than its 0.97.",
)
