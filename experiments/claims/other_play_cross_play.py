"""Lead and follow: a follower who hears every letter learns to follow them all, one that hears its own leader learns that one's alone."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.claims.fcp_cross_play import GAME, met
from experiments.lab import Arm, TableRun, recipe_of

STEPS, RUNS = 60, 2
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 4, "scale": "none", "team_reward": "individual"}
ARMS: dict[str, Any] = {"self-play": GAME, "other-play": {**GAME, "other_play": True}}


def measure(arm: Any, seed: int, rate: float) -> Result:
    """Let several teams learn apart from one another; measure them without renaming, with themselves and with one another, exactly."""
    teams = [
        TableRun(recipe_of(arm, Arm(GRPO), rate, RUNS * seed + number, training={"tasks_per_step": 4}))
        for number in range(RUNS)
    ]
    for team in teams:
        for _ in range(STEPS):
            team.step()
    return Result(met([team.say for team in teams]))


CLAIM = Claim(
    name="other_play_cross_play",
    algorithms=(),
    claim="Other-play, which renames the partner's letters, loses with unknown partners at most half of what self-play loses",
    source="other-play, 2003.02979, §4",
    setting=(
        "`speaker: leads`, as in [fictitious co-play](#fcp_cross_play): the first seat says one of six letters, and both earn 1 if the second says the same. `other_play` renames all letters for the second seat, in every "
        "episode by chance. One table of logits for each seat, 60 steps of 16 games by plain gradient ascent; two teams with every seed, measured without renaming, exact: *own* with themselves, *cross* with one "
        "another. Every arm has the rate by which it earns most with strangers."
    ),
    arms=ARMS,
    measure=measure,
    rates=(4.0, 16.0),
    chosen_by="cross",
    predictions=(
        Prediction(
            "`other-play` less `self-play`, cross",
            lambda found: found["other-play"]["cross"] - found["self-play"]["cross"],
            at_least=0.2,
            turned=0.0,
        ),
        Prediction(
            "gap of `other-play` less half of that of `self-play`",
            lambda found: found["other-play"]["gap"] - 0.5 * found["self-play"]["gap"],
            at_most=0.0,
        ),
        Prediction(
            "return with its own partner is unchanged: `other-play`, own",
            lambda found: found["other-play"]["own"],
            at_least=0.9,
        ),
    ),
    remark=(
        "No team of `other-play` lost anything with strangers. What self-play loses depends on chance: where both teams had come to follow the same letters they lost nothing either (six of 24 seeds; of the first ten three, with which the first interval "
        "began at 0.12, below its bound: there are more for that reason). In games where the speaker sees which letter is right (`speaker: helps`, four letters, a first try) some teams of `other-play` learned the only other code that no rename "
        "undoes, any letter but the one said, which is worth a third: they earned 0.63 on average with themselves and nothing with one another. [On a language model](#strangers_language) it holds too; not tried in Hanabi."
    ),
    plot="bars",
    plotted=("cross", "", "return with unknown partners"),
    seeds=24,
)
