"""Lead and follow: who learned with one leader follows its word alone; who learned with many beginners and masters follows every word."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from experiments.claim import Claim, Prediction, Result
from experiments.lab import Arm, TableRun, recipe_of
from kapelle.environments.diagnostics import Speaker

GAME: dict[str, Any] = {"name": "speaker", "speaker": "leads", "letters": 6}
STEPS, PARTNERS, RUNS = 80, 16, 2
GRPO: dict[str, Any] = {"name": "grpo", "group_size": 2, "scale": "none", "team_reward": "individual"}
Say = Callable[[int, str], Mapping[str, float]]
"""(seat, what it sees) → how likely it says each letter."""


ARMS: dict[str, Any] = {
    "self-play": None,
    "fcp": {
        "population": {"name": "fcp", "partners": PARTNERS, "alone": 0.5},
        "enter": {"every": 10},
        "start": False,
        "keep": PARTNERS * STEPS,
        "slots": PARTNERS * STEPS // 20,
    },
}


def measure(arm: Any, seed: int, rate: float) -> Result:
    """Let several teams learn apart from one another; measure them with themselves and with one another, exactly."""
    over: dict[str, Any] = {"training": {"steps": STEPS, "tasks_per_step": PARTNERS}}
    if arm is not None:
        over["league"] = arm
    teams = [
        TableRun(recipe_of(GAME, Arm(GRPO), rate, RUNS * seed + number, **over)) for number in range(RUNS)
    ]
    for team in teams:
        for _ in range(STEPS):
            team.step()
    return Result(met([team.say for team in teams]))


def met(teams: Sequence[Say]) -> dict[str, float]:
    """Return what a hearer earns with the speaker of its own team and of others, over all pairs of teams, without renaming."""
    game = Speaker.model_validate(GAME)
    paid = {
        (one, other): game.expected(lambda seat, seen: teams[(one, other)[seat]](seat, seen))[1]  # noqa: B023
        for one, other in product(range(len(teams)), repeat=2)
    }
    own = fmean(paid[one, one] for one in range(len(teams)))
    cross = fmean(worth for (one, other), worth in paid.items() if one != other)
    return {"own": own, "cross": cross, "gap": own - cross}


CLAIM = Claim(
    name="fcp_cross_play",
    algorithms=(),
    claim="With unknown partners, fictitious co-play loses at most half as much return as self-play",
    source="fictitious co-play, 2110.08176, §4; the cross-play gap, 2003.02979",
    setting=(
        "`speaker: leads`: the first agent sends one of six letters, the second reads it, and both receive reward "
        "1 if the second chooses the same letter. One table of logits for each agent, 80 steps of 32 games by "
        "plain gradient ascent. For every seed, two teams learn separately, and each first agent is then paired "
        "with each second agent: *own* is the return of teams as trained, *cross* the return with the other "
        "team's partner, and the gap is the difference; all values are exact. `fcp`: sixteen pairs learn "
        "separately for half of the games and enter the pool every ten steps; the team then learns with all of "
        "them. Every arm uses the learning rate with the highest return with unknown partners."
    ),
    arms=ARMS,
    measure=measure,
    rates=(2.0, 16.0),
    chosen_by="cross",
    predictions=(
        Prediction(
            "gap of `fcp` minus half the gap of `self-play`",
            lambda found: found["fcp"]["gap"] - 0.5 * found["self-play"]["gap"],
            at_most=0.0,
        ),
        Prediction(
            "return with its own partner is not lower: `fcp` minus `self-play`",
            lambda found: found["fcp"]["own"] - found["self-play"]["own"],
            at_least=-0.02,
        ),
    ),
    remark=(
        "In self-play, the follower often reads its own leader's letter, but other letters only as often as a "
        "beginner sends them. Letters, partners and steps were chosen after first tries with three teams: with "
        "eight letters and eight partners in 100 steps, the gap of `fcp` was 0.13 to 0.15; that of `self-play` "
        "was 0.16 at its best, slow rate and 0.41 at a fast rate. Sixteen partners send most letters, eight do "
        "not. If a leader of `fcp` sends a letter that the partners of another team hardly sent, it loses as much "
        "as self-play does (seed 2: 0.40). In other games that were tried, self-play took the safe move, or two "
        "followers exchanged letters forever, and there was nothing to gain. [With a language "
        "model](#strangers_language) partners are less varied."
    ),
    plot="bars",
    plotted=("gap", "", "cross-play gap"),
    seeds=10,
)
