"""Latest self-play goes round in rock, paper, scissors; the mixtures of fictitious play and of PSRO settle."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, recipe_of

WINS = {"RR": 0, "RP": -1, "RS": 2, "PR": 1, "PP": 0, "PS": -1, "SR": -2, "SP": 1, "SS": 0}
"""What the first player earns: rock beats scissors twice over. At the equilibrium, (1/4, 1/2, 1/4), no one gains."""
GAME: dict[str, Any] = {
    "name": "matrix",
    "game": "custom",
    "payoffs": {joint: (float(won), -float(won)) for joint, won in WINS.items()},
    "rules": "none",
}
STEPS, EVERY = 144, 6
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 16, "scale": "none", "team_reward": "individual"}
ONE = {"adapter": "player"}
TEAM: dict[str, Any] = {"agents": [{"name": "first", "weights": ONE}, {"name": "second", "weights": ONE}]}
FRESH = {"enter": {"every": EVERY, "restart": True}}

ARMS: dict[str, dict[str, Any]] = {
    "self-play": {"population": "self_play"},
    "fictitious": {"population": "fictitious", **FRESH},
    "PSRO": {"population": "psro", **FRESH},
    "PSRO, uniform": {"population": {"name": "psro", "by": "uniform"}, **FRESH},
    "fictitious, goes on": {"population": "fictitious"},
}


def measure(arm: dict[str, Any], seed: int, rate: float) -> Result:
    """Let a player learn; NashConv is exact, of each snapshot and of their mixture."""
    league = {"enter": {"every": EVERY}, "keep": STEPS, "slots": STEPS // EVERY + 1, **arm}
    run = TableRun(
        recipe_of(GAME, Arm(GRPO), rate, seed, team=TEAM, training={"tasks_per_step": 6}, league=league)
    )
    newest, mixture = [], []
    for _ in range(STEPS):
        _, row = run.step()
        if "league/nash_conv" in row:
            newest.append(row["league/nash_conv"])
            mixture.append(row["league/nash_conv_mixture"])
    half = len(newest) // 2
    return Result({"newest": fmean(newest[half:]), "mixture": mixture[-1], "area": -mixture[-1]})


CLAIM = Claim(
    name="league_cycles",
    algorithms=(),
    claim="Self-play cycles in rock, paper, scissors; PSRO's mixture is an equilibrium, and that of fictitious play comes near one",
    source="fictitious play, Brown 1951; PSRO, 1711.00832, §3; cycles of self-play, 1901.08106, §1",
    setting=(
        "Rock, paper, scissors in which rock beats scissors twice over, one table of logits for both seats, 144 steps of 96 games by plain gradient ascent. Every six steps the player enters the "
        "pool. NashConv, exact: of the snapshots of the second half, on average, and of the mixture of all of them at the end. `PSRO, uniform` draws and mixes all alike, which is fictitious play by the other road: both come to the same. Where a "
        "learner does not `restart`, it goes on from the member that it has become."
    ),
    arms=ARMS,
    measure=measure,
    rates=(2.0,),
    predictions=(
        Prediction(
            "newest snapshot of `self-play`: NashConv",
            lambda found: found["self-play"]["newest"],
            at_least=0.5,
        ),
        Prediction("mixture of `PSRO`: NashConv", lambda found: found["PSRO"]["mixture"], at_most=0.05),
        Prediction(
            "mixture of `fictitious`: NashConv", lambda found: found["fictitious"]["mixture"], at_most=0.25
        ),
        Prediction(
            "the table is what helps: mixture of `PSRO, uniform`, NashConv",
            lambda found: found["PSRO, uniform"]["mixture"],
            at_least=0.1,
        ),
        Prediction(
            "effect of restarting: `fictitious, goes on` less `fictitious`, NashConv of the mixture",
            lambda found: found["fictitious, goes on"]["mixture"] - found["fictitious"]["mixture"],
            at_least=0.2,
            turned=0.0,
        ),
    ),
    remark=(
        "Fictitious play's mixture comes nearer with every member, by the square root of their number at best: sixteen members (96 steps, a first run of ten seeds) ended at 0.25, twenty-four at 0.22 (with ten seeds the interval was 0.22 to 0.254, so that there are 24). PSRO's table tells which three "
        "of them make an equilibrium. It is the newest policy of self-play that goes round: the plain average of its own snapshots is at 0.18, nearer than fictitious play's mixture in 18 of the 24 seeds. Entropy, and an optimiser without momentum, calm self-play itself: [why it circles](explanations/self_play.md). Exploration is what a learner loses "
        "that goes on from the member that it has become: certain of one letter, it finds no other."
    ),
    plot="bars",
    plotted=("mixture", "", "NashConv of the mixture"),
    seeds=24,
)
