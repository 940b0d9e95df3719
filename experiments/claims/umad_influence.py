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
    claim="An influence reward makes an informed debater inform the other; the debater's own reward alone does not",
    source="UMAD, 2603.01221",
    setting=(
        "The debate of [MAPoRL's claim](#maporl_influence), with `ippo`, a critic for each agent and λ = 0: three "
        "questions, two rounds; one agent reads the question, the other is told to guess, and each is rewarded "
        "only for its own last answer. Influence gives a letter 0.5 if the other agent's answer is correct after "
        "it and was incorrect before, and −0.5 in the opposite case. `told` is how often the guesser is correct "
        "in the last ten steps, and `truth` how often the first letter of the informed agent is correct; the plot "
        "shows `told`."
    ),
    arms={"none": {}, "influence 0.5": {"influence": 0.5}, "confidence 0.5": {"confidence": 0.5}},
    measure=measure,
    rates=(8.0,),
    predictions=(
        better("influence 0.5", "none", 0.2, "told"),
        better("influence 0.5", "confidence 0.5", 0.2, "told"),
        Prediction(
            "With influence, how often the guesser is correct at the end",
            lambda found: found["influence 0.5"]["told"],
            at_least=0.9,
            turned=0.5,
        ),
    ),
    landmarks=lambda: {"optimum": 1.0, "chance": 1 / 3},
    remark=(
        "The guesser is informed, more than half of the way, but in five of ten runs no better than in two of "
        "three cases: two questions share a letter, and then the guesser chooses between them. Influence depends "
        "on the other agent's answer alone, so a consistent lie is rewarded like the truth: the first letter of "
        "the informed agent is correct in a fourth of cases, less often than by chance. MAPoRL's α2 and α3 "
        "distinguish the two. If nothing but influence rewards a first letter, a gain for confident turns adds "
        "its own noise, and codes form accidentally."
    ),
)
