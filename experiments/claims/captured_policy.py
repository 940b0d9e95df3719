"""One policy for two roles that it cannot tell apart: does the role with most gradient or the one with most reward win?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import Arm, TableRun, learn, recipe_of
from kapelle.environments.diagnostics import Diagnostic, History, Say

WORKERS = 3
TOKENS = 640


class TwoRoles(Diagnostic):
    """A planner earns 2/3 by the letter A, and each of three workers 1/9 by the letter B."""

    name: Literal["experiments.claims.captured_policy:TwoRoles"] = (
        "experiments.claims.captured_policy:TwoRoles"
    )
    told: bool = False
    """Whether prompts name the role."""

    def movers(self, case: int, history: History) -> tuple[int, ...]:
        """Return all players, once."""
        return () if history else tuple(range(self.seats))

    def sees(self, case: int, seat: int, history: History) -> str:
        """Return the role, or the same for all."""
        if not self.told:
            return "letter?"
        return "worker" if seat else "planner"

    def right(self, case: int, seat: int, history: History) -> str:
        """Return the letter of the role."""
        return "B" if seat else "A"

    def worth(self, seat: int) -> float:
        """Return what a player earns by its letter."""
        return 1 / (3 * WORKERS) if seat else 2 / 3

    def earned(self, case: int, history: History) -> tuple[float, ...]:
        """Return what each player has earned."""
        texts = dict(history)
        return tuple(
            self.worth(seat) * (texts.get(seat) == self.right(case, seat, history))
            for seat in range(self.seats)
        )

    def expected(self, say: Say) -> tuple[float, ...]:
        """Return the same as `Diagnostic.expected`, for letters that are rewarded independently."""
        return tuple(
            self.worth(seat) * say(seat, self.sees(0, seat, ())).get(self.right(0, seat, ()), 0.0)
            for seat in range(self.seats)
        )


def measure(arm: Mapping[str, Any], seed: int, rate: float) -> Result:
    """Let the team learn; measure the team's return and the chance of each role's letter in the planner's turn."""
    game = {
        "name": "experiments.claims.captured_policy:TwoRoles",
        "seats": 1 + WORKERS,
        "told": arm["told"],
    }
    algorithm = {"name": "grpo", "group_size": 8, "team_reward": "individual", "scale": arm["scale"]}
    weights = "one" if arm["shared"] else None
    agents = [
        {"name": f"agent_{k}", "weights": {"adapter": weights or ("workers" if k else "planner")}}
        for k in range(1 + WORKERS)
    ]
    run = TableRun(recipe_of(game, Arm(algorithm, {"team": {"agents": agents}}), rate, seed))
    curve = learn(run, TOKENS)
    said = run.say(0, "planner" if arm["told"] else "letter?")
    found = {"area": curve.area(TOKENS), "end": curve.end, "A": said.get("A", 0.0), "B": said.get("B", 0.0)}
    return Result(found, list(zip(curve.tokens, curve.values, strict=True)))


CLAIM = Claim(
    name="captured_policy",
    algorithms=("grpo",),
    claim="A policy that serves two roles and cannot tell them apart is captured by the role with most gradient, even if the other role has most of the reward",
    source="2605.24202, whose abstract was read: under a shared policy, asymmetric gradient per step lets the dominant role capture the policy",
    setting=(
        "A planner receives 2/3 for the letter A, and each of three workers 1/9 for the letter B, out of four letters. One "
        "policy serves all four agents, which read the same prompt. Advantages divided by the standard deviation give every "
        "agent's turn the same size, so the workers together have three times the planner's gradient; without division, the "
        "planner has twice theirs. In other arms, prompts name the role, or the roles have separate weights."
    ),
    arms={
        "one policy, divided": {"shared": True, "told": False, "scale": "std"},
        "one policy, not divided": {"shared": True, "told": False, "scale": "none"},
        "one policy, roles in the prompt": {"shared": True, "told": True, "scale": "std"},
        "separate policies": {"shared": False, "told": False, "scale": "std"},
    },
    measure=measure,
    rates=(1.0, 4.0, 16.0),
    predictions=(
        Prediction(
            "`one policy, divided`: probability of the workers' letter at the end",
            lambda found: found["one policy, divided"]["B"],
            at_least=0.8,
            turned=0.5,
        ),
        Prediction(
            "`one policy, not divided`: probability of the planner's letter at the end",
            lambda found: found["one policy, not divided"]["A"],
            at_least=0.8,
            turned=0.5,
        ),
        better("one policy, not divided", "one policy, divided", 0.2, "end"),
        Prediction(
            "`one policy, roles in the prompt`: the team's return at the end",
            lambda found: found["one policy, roles in the prompt"]["end"],
            at_least=0.8,
        ),
        Prediction(
            "`separate policies`: the team's return at the end",
            lambda found: found["separate policies"]["end"],
            at_least=0.8,
        ),
    ),
    landmarks=lambda: {"both letters": 1.0, "planner's letter": 2 / 3, "workers' letter": 1 / 3},
    remark=(
        "The rates are chosen by the team's return, which favours a rate at which the policy is not captured. The bounds were "
        "set before any run of the claim; one run of each arm with another seed (9001) and a rate of 4 checked the code."
    ),
)
