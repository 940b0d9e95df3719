"""GSPO's ratio of a sequence, the product of its tokens' ratios, and ratios of tokens, when samples are stale."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Anatomy, Arm, TableRun, recipe_of, tokens_of

ROWS = 4096
SPREAD = 0.8


def start(seen: str) -> Mapping[str, float]:
    """Never end before the longest text."""
    return {"": -20.0}


def measure(arm: tuple[str, int], seed: int, rate: float) -> Result:
    """Measure the noise of an update from samples of a policy whose logits differ from the learner's by chance."""
    level, length = arm
    game = {"name": "essay", "seats": 1, "letters": 2, "longest": length}
    loss = {"level": level, "clip_low": 0.999, "clip_high": 1e6}
    algorithm = {"name": "rloo", "group_size": 16, "loss": loss}
    training = {"tasks_per_step": 2, "parity_tolerance": 1e6}
    run = TableRun(recipe_of(game, Arm(algorithm), rate, seed, training=training), start)
    policy = run.team.trained[0]
    draw = torch.Generator().manual_seed(seed)
    learner = SPREAD * torch.randn(ROWS, run.model.tokens, generator=draw)
    first = run.row("1/1")
    right, wrong = learner[first, :2].double().softmax(-1).tolist()
    gradient = torch.zeros(ROWS, run.model.tokens, dtype=torch.float64)
    gradient[first, :2] = torch.tensor([right * wrong, -right * wrong])
    steps, tokens = [], 0
    for _ in range(40):
        run.engine.load_weights(policy, {"table": learner})
        run.loop.publish()
        run.player.load(policy, {"table": torch.zeros_like(learner)}, run.engine.versions[policy])
        groups, _ = run.step()
        tokens += tokens_of(groups)
        steps.append(run.engine.weights(policy)["table"].detach().double() - learner.double())
    met = run.model.met
    found = Anatomy(
        {policy: gradient[:met]}, {policy: torch.stack([step[:met] for step in steps])}, tokens / 40
    )
    return Result({"noise": found.noise / length, "cosine": found.cosine})


def ratio(arm: str, other: str) -> Any:
    """Return the ratio of two arms' noise."""
    return lambda found: found[arm]["noise"] / found[other]["noise"]


CLAIM = Claim(
    name="sequence_ratios",
    algorithms=("grpo",),
    claim="On stale samples the variance of a product of ratios grows with length, and GSPO's mean ratio has less variance than token ratios",
    source="GSPO, 2507.18071, §4.1",
    setting=(
        "One agent writes texts of 2, 4 or 8 letters `A` or `B`; the first letter decides. The samples come from "
        "a uniform policy, and the learner's logits differ from it by normal numbers with standard deviation 0.8. "
        "The measure is the noise of the learner's update without clipping, in answers, for token ratios "
        "(`token`), their product (`turn`) and their geometric mean (`sequence`). With length, the variance of a "
        "ratio falls for `sequence`, stays constant for `token` and grows exponentially for `turn`."
    ),
    arms={
        f"{level} @ {length}": (level, length)
        for level in ("token", "turn", "sequence")
        for length in (2, 4, 8)
    },
    measure=measure,
    predictions=(
        Prediction(
            "`turn`: noise in answers of 8 letters, divided by the noise in answers of 4",
            ratio("turn @ 8", "turn @ 4"),
            at_least=3.0,
            turned=2.0,
        ),
        Prediction(
            "`sequence`: noise in answers of 8 letters, divided by the noise in answers of 4",
            ratio("sequence @ 8", "sequence @ 4"),
            at_most=2.5,
        ),
        Prediction(
            "answers of 8 letters: noise of `turn`, divided by that of `sequence`",
            ratio("turn @ 8", "sequence @ 8"),
            at_least=1.2,
            turned=1.0,
        ),
        Prediction(
            "answers of 8 letters: noise of `token`, divided by that of `sequence`",
            ratio("token @ 8", "sequence @ 8"),
            at_least=1.0,
        ),
    ),
    plot="lines",
    plotted=("noise", "letters per answer", "noise of the update, answers"),
    logarithmic=True,
    remark=(
        "As intended, GSPO's ratio has less variance than the product, but its update has as much noise as the "
        "update with token ratios: a token's ratio is small if the learner considers a sampled token unlikely, "
        "and there the gradient of its log-probability is large. A mean over the answer removes this effect, and "
        "with it the correction for the letter that decides, so the expected update of `sequence` is at an angle "
        "to the gradient. This experiment does not test what GSPO's paper states about clipping and about changes "
        "in expert routing."
    ),
)
