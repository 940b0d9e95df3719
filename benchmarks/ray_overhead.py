"""What Ray adds to an episode: the same groups played by a rollout worker on a Ray of this machine, and in this process.

    OMP_NUM_THREADS=1 python -m benchmarks.ray_overhead

Two agents of the recipe `demo` solve arithmetic problems. Both sides hold the same weights and give the same episodes, which is
checked; they take turns, and the fastest round of each counts. `added_ms_per_episode` is the way to the worker and back, with the
episodes as JSON lines; `publish_ms` is the time to store new weights of all policies.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from kapelle import Trainer
from kapelle.cluster.actors import ActorConnection
from kapelle.cluster.placement import Bundles, RayPlacement, RolloutPlace
from kapelle.cluster.ray_workers import RayWorkers
from kapelle.rollout.episodes import shared_rollout
from kapelle.settings.schema import Resources
from kapelle.training.selection import training_tasks

TASKS, SAMPLES, ROUNDS = 64, 8, 5
GROUP = "kapelle-benchmark"


def main() -> None:
    """Measure, and print one JSON object."""
    with tempfile.TemporaryDirectory(prefix="kapelle-ray-", dir="/tmp") as folder:
        connection = ActorConnection.start(Path(folder))
        try:
            print(json.dumps(_measured(connection), indent=1))
        finally:
            connection.leave()


def _measured(connection: ActorConnection) -> dict[str, float]:
    connection.place(GROUP, [Resources()], spread=False, seconds=60, grows=False)
    settings = ("training.tasks_per_step=64", "warmup=null", "evaluation.before_and_after=false")
    with Trainer.from_recipe("demo", *settings) as trainer:
        placed = RayPlacement(connection.address, connection.namespace, GROUP, Bundles((RolloutPlace(0),)))
        crew = RayWorkers(
            connection,
            placed,
            trainer.config,
            trainer.setup.team,
            trainer.base_hashes,
            trainer.models,
            trainer.engine,
        )
        began = time.perf_counter()
        for policy, published in trainer.engine.publish().items():
            crew.load(policy, published.weights, published.version)
        publish = time.perf_counter() - began
        tasks = training_tasks(trainer.setup.environment, trainer.config, 1)[:TASKS]
        seconds: dict[str, list[float]] = {"here": [], "ray": []}
        for number in range(ROUNDS + 1):  # the first one warms both up
            found = []
            for name, setup in (("here", trainer.setup), ("ray", replace(trainer.setup, engine=crew))):
                began = time.perf_counter()
                found.append(shared_rollout(setup, tasks, SAMPLES, number))
                setup.engine.release_caches()
                seconds[name].append(time.perf_counter() - began)
            texts = [
                [turn.text for group in groups for e in group.episodes for turn in e.turns]
                for groups in found
            ]
            assert texts[0] == texts[1], "both play the same episodes"
        crew.close()
    here, there = min(seconds["here"][1:]), min(seconds["ray"][1:])
    episodes = TASKS * SAMPLES
    return {
        "episodes": episodes,
        "here_s": here,
        "ray_s": there,
        "ratio": there / here,
        "added_ms_per_episode": 1e3 * (there - here) / episodes,
        "publish_ms": 1e3 * publish,
    }


if __name__ == "__main__":
    main()
