"""Tables that play poker against each other: what the average of a run's later half concedes, by how the rate continues."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from experiments.claim import Claim, Found, Prediction, Result
from experiments.sampled_games import Plan, SampledGame
from kapelle.environments.openspiel.tree import tree_of

KUHN = Plan(steps=300, deals=64, group=4, rate=0.06, entropy=0.05)
LEDUC = Plan(steps=400, deals=64, group=8, rate=0.1, entropy=0.3)
ARMS: dict[str, tuple[str, Plan]] = {
    "Kuhn": ("kuhn_poker", KUHN),
    "Kuhn, falling rate": ("kuhn_poker", replace(KUHN, falling=True)),
    "Leduc": ("leduc_poker", LEDUC),
    "Leduc, falling rate": ("leduc_poker", replace(LEDUC, falling=True)),
}


@cache
def game(name: str) -> tuple[SampledGame, float]:
    """Return a game and the NashConv of even play."""
    sampled = SampledGame(tree_of(name))
    return sampled, sampled.nash_conv(sampled.even())


def measure(arm: tuple[str, Plan], seed: int, rate: float) -> Result:
    """Let two tables learn; NashConv of the last policy and of the later half's average, as shares of even play's."""
    name, plan = arm
    sampled, even = game(name)
    run = sampled.learn(plan, 100 + seed)  # 0 to 4 chose the plans
    average = sampled.nash_conv(sampled.average(run[len(run) // 2 :])) / even
    return Result({"average": average, "last": sampled.nash_conv(run[-1]) / even})


def conceded(arm: str, at_most: float) -> Prediction:
    """Return the prediction that an arm's average concedes no more than so much of even play."""
    return Prediction(
        f"average of `{arm}`: share of even play's NashConv",
        lambda found: found[arm]["average"],
        at_most=at_most,
    )


def gained(name: str) -> Prediction:
    """Return the prediction that the average concedes less where the rate stays."""

    def gain(found: Found) -> float:
        return found[f"{name}, falling rate"]["average"] - found[name]["average"]

    return Prediction(
        f"by a rate that stays, the average of {name} concedes less by so much of even play's",
        gain,
        at_least=0.0,
    )


CLAIM = Claim(
    name="poker_averages",
    algorithms=("grpo",),
    claim="With a constant learning rate, the averaged tabular policies of self-play approach an equilibrium: NashConv falls to 5 % of the uniform policy's in Kuhn poker and to 15 % in Leduc poker",
    source="averages of policies, Brown 1951; last policies circle, 1806.05358; measures, 1903.00742",
    setting=(
        "Both players of Kuhn poker (300 steps of 64 deals × 4 games, learning rate 0.06, entropy bonus 0.05) and "
        "of Leduc poker (400 steps of 64 × 8, rate 0.1, bonus 0.3) learn only from sampled games: GRPO without "
        "scale and without momentum, where each player is compared with its mean over the games with the same "
        "cards. The rate is constant, or it falls linearly to 0. NashConv is exact, as a share of the uniform "
        "policy's (0.917 and 4.747). It is measured for the last policy, and for the average of 20 policies of "
        "the later half, where each policy plays whole games."
    ),
    arms=ARMS,
    measure=measure,
    seeds=20,
    predictions=(
        conceded("Kuhn", 0.05),
        conceded("Leduc", 0.15),
        gained("Kuhn"),
        gained("Leduc"),
    ),
    plot="bars",
    plotted=("average", "", "NashConv of the average / uniform policy's"),
    remark=(
        "Rates, bonuses and numbers of games were chosen with seeds 0 to 4 (`python -m "
        "experiments.sampled_games`). For a language model in the same games, see [why self-play "
        "circles](explanations/self_play.md#legal-moves-only)."
    ),
)
