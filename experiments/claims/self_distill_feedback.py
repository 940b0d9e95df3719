"""Self-distillation from an environment's report against group comparison of a reward that is hard to find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of
from experiments.relays import Explained
from experiments.tables import Words
from kapelle.algorithms.signals.self_teacher import OPENINGS

SEATS, LETTERS, CASES = 4, 6, 4
FOLLOWS = 0.8
"""How likely a policy at first writes a letter that a context names; it is as many times less likely to write one that is ruled out."""
TOKENS = 8000
GAME = {
    "name": Explained.model_fields["name"].default,
    "seats": SEATS,
    "letters": LETTERS,
    "number_of_cases": CASES,
    "pays": "all",
}


def start(seen: str) -> Mapping[str, float]:
    """Return the start of policies that write any letter, and that follow what a context says of one."""
    if not seen.startswith(tuple(OPENINGS.values())):
        return {}
    text, odds = seen.split("\n\n")[1], math.log(FOLLOWS * (LETTERS - 1) / (1 - FOLLOWS))
    return {text[-1]: -odds if text.startswith("not ") else odds}


@dataclass(frozen=True)
class Learner:
    """One arm."""

    algorithm: Mapping[str, Any]
    game: Mapping[str, Any] = field(default_factory=dict)


def together(run: TableRun) -> float:
    """Return the probability that all agents are correct."""
    game = cast("Explained", run.environment).model_copy(update={"pays": "all"})
    return sum(game.expected(run.say))


def measure(learner: Learner, seed: int, rate: float) -> Result:
    """Let the team learn with log-linear policies: what a context adds to the logits of its prompt is fixed."""
    arm = Arm(learner.algorithm, {"environment": dict(learner.game)})
    run = TableRun(recipe_of(GAME, arm, rate, seed, training={"tasks_per_step": CASES}), start)

    def without_context(prefix: Words) -> Words:
        texts = run.renderer.said
        return tuple(each for each in prefix if not texts.get(each, "").startswith(tuple(OPENINGS.values())))

    run.model.features = without_context
    curve = learn(run, TOKENS, every=2, worth=together)
    return Result(
        {"area": curve.area(TOKENS), "end": curve.end},
        list(zip(curve.tokens, curve.values, strict=True)),
    )


SELF: dict[str, Any] = {"name": "self_distill", "group_size": 8}
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 8}
REPORTED: dict[str, Any] = {**SELF, "context": ["feedback"]}
LETTER, ERROR, SIBLING = "self_distill, letter", "self_distill, error", "self_distill, sibling"
MISLED, OWN = "self_distill, misled", "grpo, own rewards"

CLAIM = Claim(
    name="self_distill_feedback",
    algorithms=("self_distill",),
    claim="Self-distillation learns from the environment's report where the reward is too rare for GRPO, and it learns whatever the report says",
    source="SDPO, 2601.20802",
    setting=(
        "Each of four agents writes one of six letters, in four cases; the team receives its reward only if all "
        "letters are correct, which random letters are once in 1296 episodes. After an episode, the environment "
        "reports to each agent its correct letter (`letter`), or only that its letter was incorrect (`error`), or "
        "always the same incorrect letter (`misled`). Policies are log-linear: the logits of a prompt are learned, "
        "and a context adds fixed logits, with which a new policy follows it with probability 0.8. They thus stand "
        "for a model that already understands reports. `sibling` reads another episode of the group with all "
        "letters correct; `grpo, own rewards` receives each agent's own reward. The plot shows the exact "
        "probability that all letters are correct, without a context."
    ),
    arms={
        LETTER: Learner(REPORTED),
        ERROR: Learner(REPORTED, {"report": "error"}),
        SIBLING: Learner({**SELF, "context": ["sibling"]}),
        MISLED: Learner(REPORTED, {"report": "misleading"}),
        "grpo": Learner(GRPO),
        OWN: Learner({**GRPO, "team_reward": "individual"}, {"pays": "sum"}),
    },
    measure=measure,
    predictions=(
        better(LETTER, "grpo", 0.5),
        better(ERROR, "grpo", 0.3),
        better(LETTER, SIBLING, 0.3),
        Prediction(
            "`area`: a report of the letter minus GRPO with each agent's own reward",
            lambda found: found[LETTER]["area"] - found[OWN]["area"],
            at_least=-0.1,
            turned=-0.3,
        ),
        Prediction(
            "Final probability that all letters are correct after misleading reports; chance is 0.0008",
            lambda found: found[MISLED]["end"],
            at_most=LETTERS**-SEATS,
            turned=0.1,
        ),
    ),
    rates=(1.0, 4.0, 16.0, 64.0),
    landmarks=lambda: {"optimum": 1.0, "chance": LETTERS**-SEATS},
    remark=(
        "The bounds were fixed after a look at one seed, which no run uses, of an easier game with three agents "
        "and four letters (one success in 64 random episodes), where all arms but the misled one learned. That the "
        "policies understand the reports is assumed, not shown. The benefit is credit: with sampled tokens, a report "
        "is worth as much as each agent's own reward (0.006 more area), and not more, because a letter that is named "
        "but never sampled gains only through normalisation. `sibling` knows only what the reward says and learns "
        "where `grpo` does, in the cases in which a group happens to succeed: 0 to 3 of 4. The chosen rates lie at "
        "the upper edge of the grid; from 16 to 64, the area of the reported arms rises by at most 0.021 and that of "
        "`grpo` by 0.046. In the misled arm, the choice of the rate has no meaning."
    ),
)
