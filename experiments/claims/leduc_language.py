"""A tiny language model that plays Leduc poker against itself, legal moves alone: what its last policy and its average concede."""

from __future__ import annotations

from functools import lru_cache

from experiments.claim import Claim, Prediction, Result
from kapelle.rollout.evaluation.exploitability import (
    TabularPolicies,
    average,
    evaluate_table,
    language_table,
    uniform_table,
)
from kapelle.training.trainer import Trainer

STEPS, EVERY = 900, 5
SETTINGS = (
    "environment.game=leduc_poker(suit_isomorphism=True)",
    "team.sampling.choices=legal",
    "warmup=null",
    "algorithm.group_size=8",
    "algorithm.loss.entropy_coefficient=0.5",
    "algorithm.loss.entropy_end=0.2",
    "optimizer.lr=2e-3",
    "optimizer.betas=[0.0,0.99]",
    "training.tasks_per_step=64",
    f"training.steps={STEPS}",
    "evaluation=null",
    "name=leduc",
)
LAST, AVERAGE = "last policy", "average"


@lru_cache(maxsize=1)  # both arms of a seed are one run, measured one after the other
def conceded(seed: int) -> dict[str, float]:
    """Let two adapters learn; NashConv, from the scored chances of each move, as shares of even play's."""
    with Trainer.from_recipe("kuhn", *SETTINGS, f"seed={seed + 600}") as trainer:  # others chose the settings
        game = trainer.setup.environment
        tables: list[TabularPolicies] = []
        for done, _ in enumerate(trainer.steps(), start=1):
            if done % EVERY == 0:
                tables.append(language_table(trainer.setup, trainer.engine.score))
        played = {LAST: tables[-1], AVERAGE: average(game, tables[len(tables) // 2 :])}
        even = evaluate_table(game, uniform_table(game)).nash_conv
        return {arm: evaluate_table(game, table).nash_conv / even for arm, table in played.items()}


def measure(arm: str, seed: int, rate: float) -> Result:
    """Measure one policy of a seed's run."""
    return Result({"conceded": conceded(seed)[arm]})


CLAIM = Claim(
    name="leduc_language",
    algorithms=("grpo",),
    claim="Averaged over the later half of self-play, a tiny language model reaches at most 15 % of the uniform policy's NashConv in Leduc poker, with legal moves only and an annealed entropy bonus",
    source="averages of play, Brown 1951; annealed temperatures, 2206.05825; games call for no momentum, 1807.04740; measures, 1903.00742",
    setting=(
        "The recipe `kuhn` (two LoRA adapters on two layers of width 64) in Leduc poker with legal moves alone and without a warm-up, so that the base is one of random weights; 900 steps of 64 deals × 8 games, without momentum and with a β₂ of 0.99, a rate that falls from 2e-3 to 0, an entropy bonus that falls from 0.5 to 0.2. "
        "Suits, which decide nothing in this game, are not shown (OpenSpiel's `suit_isomorphism`): 288 information states in place of 936, and the same NashConv. It is exact, from the scored chances of each move, as a share of even play's 4.747: of the last policy, and of the average of the ninety policies after every fifth step of the later half, each played for a whole game."
    ),
    arms={LAST: LAST, AVERAGE: AVERAGE},
    measure=measure,
    one_run=True,
    seeds=10,
    predictions=(
        Prediction(
            "`average`: share of uniform play's NashConv",
            lambda found: found[AVERAGE]["conceded"],
            at_most=0.15,
        ),
        Prediction(
            "`average` is less exploitable than `last policy` by so much of uniform play's",
            lambda found: found[LAST]["conceded"] - found[AVERAGE]["conceded"],
            at_least=0.0,
        ),
    ),
    plot="bars",
    plotted=("conceded", "", "NashConv / uniform play's"),
    remark=(
        "Settings were chosen with other seeds; those of the claim were used for nothing else. [What was tried](explanations/self_play.md#legal-moves-alone)."
    ),
)
