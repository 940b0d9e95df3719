"""M-GRPO's alignment: an attempt counts once for an agent, however often it was called."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of
from experiments.relays import Calls

NOISE = 0.2
CALLED = "agent_1"


def measure(arm: tuple[str, bool], seed: int, rate: float) -> Result:
    """Measure noise and direction of the first update of the one that is called, and how far each case moves it."""
    align, told = arm
    game = {"name": Calls.model_fields["name"].default, "seats": 2, "told": told, "noise": NOISE}
    algorithm: dict[str, Any] = {"name": "m_grpo", "group_size": 4, "scale": "none", "align": align}
    run = TableRun(recipe_of(game, Arm(algorithm), rate, seed, training={"tasks_per_step": 16}))
    found = anatomy(run, 60)
    mean, towards = found.steps[CALLED].mean(0), found.gradient[CALLED]
    own = found.steps[CALLED] / (mean * towards).sum() * towards.square().sum()
    measured = {
        "noise": float((own - towards).square().sum((1, 2)).mean() / towards.square().sum()) * found.tokens
    }
    if told:
        once, often = found.multiples(CALLED, [run.row("2/2 0"), run.row("2/2 1")])
        measured["ratio"] = once / often
    return Result(measured)


CLAIM = Claim(
    name="calls_aligned",
    algorithms=("m_grpo",),
    claim="Weighting an agent's calls so that episodes count equally reduces variance where calls are alike, and adds bias where they differ",
    source="M-GRPO, 2511.13288, §3",
    setting=(
        "One agent calls another once in half of the attempts and four times in the others; each call is worth its share of the attempt's pay, which is turned round with a chance of 0.2. "
        "Groups of 4, sixteen tasks a step, drawn by chance. Noise is that of the called agent's first update. Told, the called one reads which case it is, so that calls of either case teach it something of their own."
    ),
    arms={
        "weights": ("weights", False),
        "none": ("none", False),
        "weights, told": ("weights", True),
        "none, told": ("none", True),
    },
    measure=measure,
    predictions=(
        Prediction(
            "Noise without weights over that with them; by hand 1.43",
            lambda found: found["none"]["noise"] / found["weights"]["noise"],
            at_least=1.2,
            turned=1.0,
        ),
        Prediction(
            "Case observed, with weights: update for one call relative to four calls, over the gradient's ratio; by hand 4",
            lambda found: found["weights, told"]["ratio"],
            at_least=3.0,
            turned=1.5,
        ),
        Prediction(
            "Case observed, without weights, likewise; by hand 1",
            lambda found: found["none, told"]["ratio"],
            at_most=1.3,
        ),
    ),
    plot="bars",
    plotted=("noise", "", "noise of the update, tokens"),
    remark=(
        "There is less noise with weights, by a fifth and not by the 1.43 that was thought beforehand: pay that is turned round varies less where a fourth of four calls was right (0.25 against 0.39), so that attempts with many calls were not as noisy as that; reckoned rightly it is 1.20. "
        "In a first run of four tasks in groups of 16 the gradient without weights was bent too, 1.30 to 1, as steps of few tokens weigh each of them more and hold more of the attempts with one call; sixteen tasks a step are the one thing that was changed, and the groups of 4 that keep the number of attempts."
    ),
)
