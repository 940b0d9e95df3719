"""GRPO's mean over each answer's tokens, which Dr.GRPO replaces by a sum over a constant, and DAPO by one mean over all tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import Arm, TableRun, anatomy, learn, recipe_of

GAME = {"name": "essay", "seats": 1, "letters": 2, "longest": 5, "noise": 0.2}
TOKENS = 6000


def start(seen: str) -> Mapping[str, float]:
    """End after a letter with a chance of a fifth."""
    return {"": -0.7}


def measure(loss: dict[str, Any], seed: int, rate: float) -> Result:
    """Measure the pull on the length of right and wrong answers at the start, and their lengths after learning."""
    algorithm = {"name": "grpo", "group_size": 8, "scale": "none", "loss": loss}
    recipe = recipe_of(GAME, Arm(algorithm), rate, seed, training={"tasks_per_step": 4})
    run = TableRun(recipe, start)
    found = anatomy(run, 60)
    step, end = found.steps["agent_0"].mean(0), run.renderer.end
    first, right, wrong = run.row("1/1"), run.row("1/1", "A"), run.row("1/1", "B")
    run = TableRun(recipe, start)
    learn(run, TOKENS, every=1000)
    right_length, wrong_length = (mean_length(run, letter) for letter in "AB")
    return Result(
        {
            "pull": float((step[right, end] - step[wrong, end]) / step[first, 0]),
            "cosine": found.cosine,
            "longer": wrong_length - right_length,
        }
    )


def mean_length(run: TableRun, letter: str) -> float:
    """Return the mean number of letters of texts that begin with a letter."""
    texts = {text: chance for text, chance in run.say(0, "1/1").items() if text.startswith(letter)}
    return sum(len(text) * chance for text, chance in texts.items()) / sum(texts.values())


CLAIM = Claim(
    name="length_bias",
    algorithms=("grpo",),
    claim="A mean over each answer's own tokens makes correct answers shorter and incorrect answers longer; a single mean or sum over all tokens avoids this",
    source="Understanding R1-Zero-Like Training (Dr.GRPO), 2503.20783, §3.1",
    setting=(
        "One agent writes texts of up to 5 letters, `A` or `B`; a text is correct if it begins with `A`, and its "
        "length has no effect. A verifier errs in 20 % of cases. A step has 8 episodes per task and 4 tasks. "
        "`pull` is how much more the expected first update raises the probability (in logits) of ending after `A` "
        "than after `B`, per logit by which it raises `A`; by enumeration it is 0.18 with a mean over each "
        "answer. `longer` is the number of letters by which incorrect texts exceed correct texts after 6000 "
        "tokens; it is 0 at the start."
    ),
    arms={
        "sequence_mean": {"aggregation": "sequence_mean"},
        "token_mean": {"aggregation": "token_mean"},
        "sequence_sum": {"aggregation": "sequence_sum", "constant": 3},
    },
    measure=measure,
    quick=2,
    rates=(4.0,),
    predictions=(
        Prediction(
            "`pull` of `sequence_mean`",
            lambda found: found["sequence_mean"]["pull"],
            at_least=0.12,
            turned=0.0,
        ),
        Prediction("`pull` of `token_mean`", lambda found: found["token_mean"]["pull"], at_most=0.04),
        Prediction("`pull` of `sequence_sum`", lambda found: found["sequence_sum"]["pull"], at_most=0.04),
        Prediction(
            "cosine of `sequence_mean`'s expected update to the gradient",
            lambda found: found["sequence_mean"]["cosine"],
            at_most=0.95,
        ),
        Prediction(
            "cosine of `sequence_sum`'s expected update to the gradient",
            lambda found: found["sequence_sum"]["cosine"],
            at_least=0.97,
        ),
        better("sequence_mean", "sequence_sum", 0.15, "longer"),
        better("sequence_mean", "token_mean", 0.15, "longer"),
    ),
    plot="bars",
    plotted=("longer", "", "extra letters of incorrect texts"),
)
