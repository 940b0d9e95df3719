"""How far does the order of sums carry a run? `python -m benchmarks.order_of_sums [qmix|mappo] [STEPS]`.

One process learns with all tokens in one micro-batch, with smaller micro-batches, and two and three processes learn the
same; each is compared with the first, step by step: the largest difference of a weight, and how many episodes
were sampled differently.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tests.algorithms.test_every_algorithm import run_of
from tests.support.ranks import run_ranks
from tests.support.tiny import frozen_copy
from tests.training.test_ranks import Weights, furthest

from kapelle.training.trainer import Trainer

CASES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "qmix": (6, {}),
    "mappo": (30, {"team": {"sharing": "shared"}}),
}
"""Steps, and what is set besides `run_of`."""

Trail = list[tuple[Weights, list[list[tuple[int, ...]]]]]
"""After each step: all weights, and what was said in each episode."""


def trail(name: str, steps: int, **training: int) -> Trail:
    """Return what a run learns and says, step by step."""
    settings = run_of(name)
    settings["optimizer"] = {"lr": 1e-2}
    settings["training"] = {**settings.get("training", {}), "tasks_per_step": 3, **training}
    for section, values in CASES[name][1].items():
        settings[section] = {**settings.get(section, {}), **values}
    found: Trail = []
    with Trainer(**settings) as run:
        learners = [
            *run.team.trained,
            *(critic.name for critic in run.team.critics.values() if critic.trained),
        ]
        for step in run.steps(steps):
            weights: Weights = {learner: frozen_copy(run.engine.weights(learner)) for learner in learners}
            said = [
                [turn.completion_ids for turn in one.turns] for group in step.groups for one in group.episodes
            ]
            found.append((weights, said))
    return found


def report(label: str, one: Trail, other: Trail) -> None:
    """Print the differences at a few steps."""
    apart = [furthest(a, b) for (a, _), (b, _) in zip(one, other, strict=True)]
    episodes = [x != y for (_, a), (_, b) in zip(one, other, strict=True) for x, y in zip(a, b, strict=True)]
    shown = sorted({0, *range(len(apart) // 6 - 1, len(apart), max(1, len(apart) // 6))})
    print(
        f"{label:24}",
        *(f"{k + 1}: {apart[k]:.1e}" for k in shown if k >= 0),
        f"{sum(episodes)} of {len(episodes)} episodes",
        flush=True,
    )


def main() -> None:
    """Measure one case."""
    name = sys.argv[1] if len(sys.argv) > 1 else "qmix"
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else CASES[name][0]
    alone = trail(name, steps)
    for tokens in (32, 64, 128):
        report(f"micro-batches of {tokens}", alone, trail(name, steps, microbatch_tokens=tokens))
    for ranks in (2, 3):
        report(f"{ranks} processes", alone, run_ranks(ranks, trail, name, steps)[0])


if __name__ == "__main__":
    main()
