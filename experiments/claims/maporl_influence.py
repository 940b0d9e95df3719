"""MAPoRL's pay for influence: does a debater that knows tell the other, and in truth?"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import FAR, Arm, TableRun, recipe_of, tokens_of
from experiments.questions import Letters
from kapelle.types import Group

GAME = {"name": Letters.model_fields["name"].default, "letters": 3}
TOKENS = 12_000
LAST = 10
"""Steps over which the end is measured."""


def by_round(groups: Sequence[Group]) -> tuple[float, float]:
    """Return how often the one that knows is right at first, and the other in the end, as sampled."""
    episodes = [episode for group in groups for episode in group.episodes]
    first = [episode.by("knows")[0].score for episode in episodes]
    final = [episode.by("guesses")[-1].score for episode in episodes]
    return fmean(one or 0.0 for one in first), fmean(one or 0.0 for one in final)


def measure(paid: dict[str, Any], seed: int, rate: float) -> Result:
    """Let two debate; return what came of the last steps' episodes."""
    algorithm = {"name": "maporl", "horizon": "last", "group_size": 16, "sharing": "individual", **paid}
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
    area = fmean(final for _, final in seen)
    curve = [(places[k], fmean(final for _, final in seen[k : k + 2])) for k in range(0, len(seen) - 1, 2)]
    return Result({"truth": truth, "told": told, "area": area}, curve)


def influence(*alpha: float) -> dict[str, Any]:
    """Return what an arm is paid for influence."""
    return {"influence": list(alpha)}


def at_least(arm: str, measure: str, bound: float, turned: float, says: str) -> Prediction:
    """Return the prediction that an arm's measure is at least so much."""
    return Prediction(says, lambda found: found[arm][measure], at_least=bound, turned=turned)


def at_most(arm: str, measure: str, bound: float, turned: float, says: str) -> Prediction:
    """Return the prediction that an arm's measure is at most so much."""
    return Prediction(says, lambda found: found[arm][measure], at_most=bound, turned=turned)


CLAIM = Claim(
    name="maporl_influence",
    algorithms=("maporl",),
    claim="MAPoRL's influence reward makes an informed debater inform the other: truthfully if α2 > α3, and with lies if α2 < α3 and it is the only reward",
    source="MAPoRL, 2502.18439, §3.3",
    setting=(
        "A debate of two rounds on three questions, each with its own correct letter. One agent reads the "
        "question, and the other is told to guess; in the second round each reads the other's first letter. All "
        "agents start with a uniform policy. In all arms except the last, a turn is rewarded only for its own "
        "agent's last answer, so only influence rewards a first letter. `told` is how often the guesser is "
        "correct at the end, and `truth` how often the first letter of the informed agent is correct, in the "
        "episodes of the last ten steps; the plot shows `told`."
    ),
    arms={
        "no influence": {},
        "α2 = 1": influence(0.0, 0.0, 1.0, 0.0),
        "α3 = 1": influence(0.0, 0.0, 0.0, 1.0),
        "α of the recipes, times 5": influence(0.5, 1.0, 0.5, 1.0),
        "the recipes' pay": {
            "horizon": "discounted_sum",
            "sharing": "all",
            "discount": 0.3,
            **influence(0.1, 0.2, 0.1, 0.2),
        },
    },
    measure=measure,
    rates=(8.0,),
    predictions=(
        better("α2 = 1", "no influence", 0.2, "told"),
        better("α3 = 1", "no influence", 0.2, "told"),
        at_least(
            "α2 = 1", "truth", 0.9, 1 / 3, "With α2, how often the informed agent's first letter is correct"
        ),
        at_most(
            "α3 = 1", "truth", 0.1, 1 / 3, "With α3, how often the informed agent's first letter is correct"
        ),
        at_most(
            "α of the recipes, times 5",
            "truth",
            1 / 3,
            0.5,
            "With α3 twice α2 and influence as the only reward, how often the informed agent's first letter is correct",
        ),
        at_least(
            "the recipes' pay",
            "truth",
            0.9,
            0.5,
            "With the recipes' rewards, how often the informed agent's first letter is correct; a correct first answer gives 0.77, and a lie gives 0.1 more than the truth",
        ),
    ),
    landmarks=lambda: {"optimum": 1.0, "chance": 1 / 3},
    remark=(
        "Not shown is that lies help as much as the truth. The informed agent always lies (never the truth in ten "
        "seeds), but two questions often share one lie, and then the guesser is correct in two of three cases; "
        "with truthful letters this cannot happen. If α3 is twice α2, the guesser is correct in more than 0.9 of "
        "cases in eight of ten seeds. Without influence, `told` is 0.66 and not 0.33 as expected: advantages that "
        "are pure noise are scaled to size one, so the first letters of the informed agent drift until they "
        "accidentally form a code, which the guesser then reads."
    ),
)
