"""Differences from the mean of each turn, summed over an episode's turns, where the policy decides how many turns there are."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from experiments.claim import Claim, Found, Prediction, Result
from experiments.lab import Arm, TableRun, anatomy, recipe_of
from kapelle.algorithm import Algorithm, Credit
from kapelle.algorithms.shared.groups import BY_SCALE, Earlier, by_agent_turn, compare
from kapelle.algorithms.shared.monte_carlo import MonteCarlo, spread
from kapelle.environments.diagnostics import Diagnostic, History
from kapelle.rows import Signals, TurnKey
from kapelle.types import Group

REPEATS = 40


class SummedDifferences(MonteCarlo):
    """Each turn's reward less the mean reward of turns with its number; a turn gets the sum of these differences from it on."""

    name: Literal["experiments.claims.turn_baselines:SummedDifferences"] = (
        "experiments.claims.turn_baselines:SummedDifferences"
    )

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return self.row(self.name, judge=self.credit)

    def credit(
        self, groups: Sequence[Group], signals: Signals, earlier: Earlier | None = None
    ) -> Mapping[TurnKey, Credit]:
        """Return A_t = Σ_{k ≥ t} (r_k − mean r_k), over the turns that the episode has."""
        reward = self.rewards(groups, signals)
        members = [member._replace(value=reward[member.keys[0]]) for member in by_agent_turn(groups, reward)]
        difference = compare(members, BY_SCALE["none"], earlier)
        advantage = {
            key: sum(
                own
                for other, own in difference.items()
                if (other.group, other.episode) == (key.group, key.episode) and other.turn >= key.turn
            )
            for key in difference
        }
        return spread(self, groups, advantage)


class Stopping(Diagnostic):
    """Three rounds: the letter A pays 0.25 and, if it `stops`, ends the game; the last round pays 0.5 for any letter."""

    name: Literal["experiments.claims.turn_baselines:Stopping"] = "experiments.claims.turn_baselines:Stopping"
    stops: bool = True

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return the player until it stops, and for three rounds at most."""
        stopped = self.stops and any(text == "A" for _, text in history)
        return () if stopped or len(history) == 3 else (0,)

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the number of the round."""
        return str(len(history))

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the letter of the best player, which continues."""
        return "B" if self.stops else "A"

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return 0.25 for each A of the first two rounds, and 0.5 for the last round."""
        return (sum(0.5 if k == 2 else 0.25 * (text == "A") for k, (_, text) in enumerate(history)),)


def measure(arm: tuple[str, bool], seed: int, rate: float) -> Result:
    """Compare the expected first update of a random policy with the exact gradient of its return."""
    name, stops = arm
    game = {
        "name": "experiments.claims.turn_baselines:Stopping",
        "seats": 1,
        "letters": 3,
        "stops": stops,
    }
    draw = random.Random(f"stopping {seed}")
    logits = {str(k): {letter: draw.gauss(0.0, 0.5) for letter in "ABC"} for k in range(3)}
    algorithm: dict[str, Any] = {"name": name, "group_size": 8}
    if name != SummedDifferences.model_fields["name"].default:
        algorithm["scale"] = "none"
    run = TableRun(recipe_of(game, Arm(algorithm), rate, seed), lambda seen: logits.get(seen, {}))
    found = anatomy(run, REPEATS)
    [policy] = run.team.trained
    first = run.row("0")
    return Result(
        {
            "cosine": found.cosine,
            "first round": found.multiples(policy, [first])[0],
        }
    )


def along(arm: str, says: str, at_least: float | None = None, at_most: float | None = None) -> Prediction:
    """Predict the cosine between an arm's expected update and the gradient."""

    def of(found: Found) -> float:
        return found[arm]["cosine"]

    return Prediction(says, of, at_least=at_least, at_most=at_most)


SUMMED = SummedDifferences.model_fields["name"].default
CLAIM = Claim(
    name="turn_baselines",
    algorithms=("at_grpo",),
    claim="If the policy decides when to stop, sums of differences from each turn's mean are biased; returns from a turn on, compared by turn, are not",
    source="verl issue 7244 (August 2026), whose text was read: the summary's bias of per-turn baselines of MT-GRPO's kind",
    setting=(
        "One agent, three letters, at most three rounds. In the first two rounds, the letter A receives 0.25 and, in the "
        "arms with stops, ends the episode; the other letters receive 0 and continue. The last round gives 0.5 for any letter. "
        "Policies start at random, eight episodes per step, no division by the standard deviation. The cosine is that between "
        "the expected first update and the exact gradient of the return, from 40 updates."
    ),
    arms={
        "summed differences, stops": (SUMMED, True),
        "at_grpo, stops": ("at_grpo", True),
        "summed differences, three rounds": (SUMMED, False),
    },
    measure=measure,
    predictions=(
        along(
            "summed differences, stops",
            "stops: cosine of `summed differences` with the gradient",
            at_most=0.5,
        ),
        Prediction(
            "stops: the first round's update of `summed differences` is a multiple of its gradient",
            lambda found: found["summed differences, stops"]["first round"],
            at_most=0.0,
        ),
        along("at_grpo, stops", "stops: cosine of `at_grpo` with the gradient", at_least=0.9),
        along(
            "summed differences, three rounds",
            "always three rounds: cosine of `summed differences` with the gradient",
            at_least=0.9,
        ),
    ),
    plot="bars",
    plotted=("cosine", "", "cosine with the exact gradient"),
    remark=(
        "A turn that continues is compared with the mean of later turns for every reward that follows, and a turn that stops "
        "is not. On average, the sum for continuing is therefore 0 beyond the present round, so what continuing leads to does "
        "not count. The bounds were set before any run of the claim; one run of each arm with another seed (9001) checked the "
        "code."
    ),
)
