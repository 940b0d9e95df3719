"""Sampling in a second process while this one learns, against one after the other; and what stale samples cost.

    python -m benchmarks.overlap                       # wall time of a step of the demo, on two idle cores
    python -m benchmarks.overlap --learning --seeds 10 # success of the demo at max_staleness 0 to 4 (hours)

Both sides of a pair learn from the same episodes, bitwise, on one thread each. `ratio` is the time of a step with a
second process over that without one; its bar is 0.75. Only a machine with two idle cores can tell.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from benchmarks.measure import single_thread
from kapelle import Trainer

STEPS, FIRST, ROUNDS = 12, 3, 3
CORRECTED = "algorithm.loss.importance_cap=2.0"
"""Truncated importance sampling, which corrects what older weights sampled."""
QUIET = ("evaluation.before_and_after=false", CORRECTED)


def run(steps: int = STEPS, rounds: int = ROUNDS) -> dict[str, Any]:
    """Return the median seconds of a step of the demo with and without a second process, in turns."""
    single_thread()
    seconds: dict[bool, list[float]] = {False: [], True: []}
    parts: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(rounds):
        for overlap in (False, True) if number % 2 == 0 else (True, False):
            for row in _rows(steps, overlap):
                seconds[overlap].append(row["time/step"])
                parts[overlap].append((row["time/generate"], row["time/update"]))
    one, two = (statistics.median(seconds[overlap]) for overlap in (False, True))
    return {
        "step_s": {"one_process": one, "two_processes": two},
        "generate_s": {str(k): statistics.median(g for g, _ in each) for k, each in parts.items()},
        "update_s": {str(k): statistics.median(u for _, u in each) for k, each in parts.items()},
        "ratio": two / one,
        "bar": 0.75,
    }


def _rows(steps: int, overlap: bool) -> list[dict[str, float]]:
    settings = (
        *QUIET,
        f"training.steps={steps}",
        "training.max_staleness=1",
        f"training.overlap={str(overlap).lower()}",
    )
    with Trainer.from_recipe("demo", *settings) as trainer:
        rows = [dict(step.metrics) for step in trainer.steps()]
    return rows[FIRST:]  # the first ones fill the queue and wait for the other process to start


def learning(seeds: int, steps: int) -> dict[str, Any]:
    """Return the demo's success on unseen problems after training, by `max_staleness`, for every seed."""
    single_thread()
    found: dict[str, list[float]] = {}
    for staleness in range(5):
        for seed in range(seeds):
            settings = (
                CORRECTED,
                f"training.steps={steps}",
                f"training.max_staleness={staleness}",
                f"seed={seed}",
                "evaluation.before_and_after=false",
            )
            with Trainer.from_recipe("demo", *settings) as trainer:
                trainer.train()
                found.setdefault(str(staleness), []).append(trainer.evaluate(500).success or 0.0)
            print(staleness, seed, found[str(staleness)][-1], file=sys.stderr, flush=True)
    return {key: {"mean": statistics.mean(values), "seeds": values} for key, values in found.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    chosen = parser.parse_args()
    print(json.dumps(learning(chosen.seeds, chosen.steps) if chosen.learning else run(), indent=2))
