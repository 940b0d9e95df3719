"""Shared weights and adapters at four rates, with one role and with four, in teams of four and two."""

from __future__ import annotations

from typing import Any

from experiments.claim import Claim, Prediction, Result, better
from experiments.lab import language_curve

TOKENS = 8000
SIZE = {"layers": 2, "heads": 2, "kv_heads": 1, "context": 64, "hidden": 64, "intermediate": 128}


def measure(arm: tuple[str, int, int], seed: int, rate: float) -> Result:
    """Let a team of tiny language models learn."""
    weights, seats, roles = arm
    adapters = {"sharing": "lora", "lora": {"rank": 4, "alpha": 8.0}}
    recipe: dict[str, Any] = {
        "environment": {"name": "sum_game", "seats": seats, "number_of_cases": 2, "roles": roles},
        "workflow": {"name": "play"},
        "algorithm": {"name": "grpo", "group_size": 8, "team_reward": "individual"},
        "team": {
            "agents": seats,
            "sampling": {"max_tokens": 2},
            **(adapters if weights == "adapters" else {"sharing": "shared"}),
        },
        "model": {"path": "embedded", "embedded": SIZE},
        "warmup": {"steps": 100, "demonstrations": 400},
        "training": {"steps": 1000, "tasks_per_step": 2},
        "evaluation": {"before_and_after": False},
        "optimizer": {"lr": rate},
        "record": {"credit_episodes": 0},
        "seed": seed,
    }
    # As many tokens for each agent, whatever their number.
    curve = language_curve(recipe, TOKENS * seats // 4)
    return Result({"area": curve.area(TOKENS * seats // 4), "end": curve.end})


CLAIM = Claim(
    name="sharing_rates",
    algorithms=("grpo",),
    claim="With the best learning rate for each arm, shared weights are ahead with one role and adapters with four; sharing gains more with four agents than with two",
    source="selective parameter sharing, 2102.07475; shared or separate weights for roles: AT-GRPO, 2510.11062",
    setting=(
        "As in `sharing`, with four learning rates in place of two: tiny language models, with an adapter of rank "
        "4 for each agent or with one set of weights of which all are trained. Four agents with one role or four "
        "roles, and two agents with one role (2,000 sampled tokens for each agent); each agent is rewarded for "
        "its own letter."
    ),
    arms={
        "shared, 4 agents, 1 role": ("shared", 4, 1),
        "adapters, 4 agents, 1 role": ("adapters", 4, 1),
        "shared, 4 agents, 4 roles": ("shared", 4, 4),
        "adapters, 4 agents, 4 roles": ("adapters", 4, 4),
        "shared, 2 agents, 1 role": ("shared", 2, 1),
        "adapters, 2 agents, 1 role": ("adapters", 2, 1),
    },
    measure=measure,
    rates=(3e-4, 1e-3, 3e-3, 1e-2),
    seeds=5,
    predictions=(
        better("shared, 4 agents, 1 role", "adapters, 4 agents, 1 role", 0.03),
        better("adapters, 4 agents, 4 roles", "shared, 4 agents, 4 roles", 0.1),
        Prediction(
            "with one role, lead of sharing in a team of four minus its lead in a team of two",
            lambda found: (
                found["shared, 4 agents, 1 role"]["area"]
                - found["adapters, 4 agents, 1 role"]["area"]
                - found["shared, 2 agents, 1 role"]["area"]
                + found["adapters, 2 agents, 1 role"]["area"]
            ),
            at_least=0.05,
            turned=0.0,
        ),
    ),
    plot="bars",
    plotted=("area", "", "mean return over tokens"),
    remark=(
        "No arm used a rate at the edge of the grid, so the results of `sharing` for these arms do not depend on "
        "its two rates. But with one role the advantage does not come from sharing. One agent alone (five seeds, "
        "with the rates of these arms) learns faster by the same amount if all weights are trained (area 0.74) "
        "than with an adapter (0.46), and it is not certain that one adapter for all four agents is faster than "
        "an adapter for each (0.61 and 0.58, ahead in three of five seeds at rate 0.003). Training all weights is "
        "faster than an adapter of rank 4, with any assignment to agents. Teams of all sizes use the same number "
        "of steps, and more answers per step help shared weights little: 0.74, 0.79 and 0.82 with one, two and "
        "four agents. Adapters rise from 0.46 to 0.52 and 0.58, although each adapter has as many answers as "
        "before. With four roles adapters are ahead by 0.13, which is not certain to exceed 0.1."
    ),
)
