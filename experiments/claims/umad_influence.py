"""UMAD's pay for influence: does a debater that knows tell the other, and in truth?"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.claims.maporl_influence import GAME, LAST, TOKENS, by_round
from experiments.lab import FAR, Arm, TableRun, recipe_of, tokens_of


def measure(umad: dict[str, float], seed: int, rate: float) -> Result:
    """Let two debate; return what came of the last steps' episodes."""
    algorithm: dict[str, Any] = {
        "name": "ippo",
        "group_size": 16,
        "team_reward": "individual",
        "epochs": 1,
        "gae": {"normalise": "none", "lam": 0.0},
        "umad": umad,
    }
    over = {
        "workflow": {"name": "debate", "rounds": 2, "score_rounds": True, "reply": "{answers}"},
        "optimizer": {"critic_lr": 0.25 * FAR},
        "training": {"tasks_per_step": 3},
        "team": {"agents": [{"name": "knows"}, {"name": "guesses", "prompt": "Guess."}]},
    }
    run = TableRun(recipe_of(GAME, Arm(algorithm, over), rate, seed))
    spent, places, seen = 0, [], []
    while spent < TOKENS:
        groups, _ = run.step()
        places.append(spent)
        spent += tokens_of(groups)
        seen.append(by_round(groups))
    truth, told = (fmean(column) for column in zip(*seen[-LAST:], strict=True))
    curve = [(places[k], fmean(final for _, final in seen[k : k + 2])) for k in range(0, len(seen) - 1, 2)]
    return Result({"truth": truth, "told": told, "area": fmean(final for _, final in seen)}, curve)


CLAIM = Claim(
    name="umad_influence",
    algorithms=("umad",),
    claim="An influence reward makes an informed debater inform the other; its own reward alone leaves it silent",
    source="2603.01221",
    setting="The debate of [MAPoRL's claim](#maporl_influence), by `ippo` with a critic for each and λ = 0: three questions, two rounds, one agent reads the question and the other that it should guess, and each is paid for its own last answer alone. "
    "Influence pays a letter 0.5 if the other's answer is right after it and was wrong before, and takes as much for the contrary. `told` is how often the guesser is right in the last ten steps, `truth` how often the first letter of the one that knows is; drawn is `told`.",
    arms={"none": {}, "influence 0.5": {"influence": 0.5}, "confidence 0.5": {"confidence": 0.5}},
    measure=measure,
    rates=(8.0,),
    predictions=(
        better("influence 0.5", "none", 0.2, "told"),
        better("influence 0.5", "confidence 0.5", 0.2, "told"),
        Prediction(
            "Informed at the end with influence",
            lambda found: found["influence 0.5"]["told"],
            at_least=0.9,
            turned=0.5,
        ),
    ),
    landmarks=lambda: {"optimum": 1.0, "chance": 1 / 3},
    remark=(
        "The guesser is told, and more than half of the way, but in five runs of ten no better than two times in three: two questions share a letter, and then it guesses between them. Influence looks at the other's answer alone, so that a lie which is always the same pays as well as the truth: "
        "the one that knows is right at first in a fourth of cases, less often than by chance. MAPoRL's α2 and α3 tell the two apart. Where nothing but influence pays a first letter, a gain for confident turns adds noise of its own, by which codes come about by accident."
    ),
)
