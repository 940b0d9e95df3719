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
    claim="Distillation on the team's own samples teaches recovery from a team-mate's error; demonstrations teach it only if they contain such errors",
    source="GKD, 2306.13649, §3",
    setting=(
        "The game is a chain of four agents. The first, a frozen team-mate, chooses an incorrect letter half of "
        "the time; the others should choose the letter that follows the one they read, whatever it is, and they "
        "start with a uniform policy. The plot shows the exact probability that they do so. The teacher of "
        "`distill` chooses the correct letter with probability 0.97; demonstrations are always correct and come "
        "from a team whose first agent is also correct, or errs like the team-mate."
    ),
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
            "Final probability that students follow: `distill` minus demonstrations without errors; by hand 0.26",
        ),
        Prediction(
            "Final probability that students follow after demonstrations without errors; by hand 0.71, because after an error the second agent is correct only by chance",
            lambda found: found["sft, a team without errors"]["end"],
            at_most=0.73,
            turned=0.9,
        ),
        better(
            "sft, beside the mate that errs",
            "distill",
            0.0,
            "area",
            "Demonstrations next to the erring team-mate teach at least as fast as `distill`",
        ),
    ),
    rates=(4.0, 16.0, 64.0, 256.0),
    landmarks=lambda: {"the teacher": RIGHT, "chance": 0.25},
    remark=(
        "What matters is which letters the agents read while they learn. For a letter that it has never read, a "
        "table keeps its initial answer; a language model guesses, with varying success. If an expert can act "
        "together with the real team, its demonstrations teach faster than a teacher's log-probs of one sampled "
        "letter. Distillation on own samples needs no expert that takes part, and it adapts when the team's "
        "errors change. The best learning rates lie at the edge of the grid and have little effect: from 16 to "
        "256, no arm's area changes by more than 0.016. At 256, students settle on the teacher's most likely "
        "letter, so their probability of following exceeds its 0.97."
    ),
)
