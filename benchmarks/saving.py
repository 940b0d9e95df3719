"""What saving a checkpoint costs a step: a save that training waits for, against one that is written in the background.

    python -m benchmarks.saving

One process trains all weights (9.3 M: 112 MB of weights and moments, and the model once more in `policies/`) and saves at every
step, in turns in either way. `foreground` is for how long training does not go on, `cpu` the seconds of the processor that a step
and its save take together; ratios are those of the background over waiting.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import SETTINGS

STEPS, FIRST = 5, 1


def run() -> dict[str, Any]:
    """Return the median seconds of either way, in turns of two runs each."""
    rows: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for background in (False, True, True, False):
        rows[background] += _train(background)
    medians = {
        name: {key: statistics.median(row[key] for row in rows[background]) for key in rows[background][0]}
        for name, background in (("waiting", False), ("background", True))
    }
    ratios = {key: medians["background"][key] / medians["waiting"][key] for key in medians["waiting"]}
    return {"seconds": medians, "ratios": ratios}


def _train(background: bool) -> list[dict[str, float]]:
    import torch

    from kapelle import Trainer
    from kapelle.training.progress import Progress

    torch.set_num_threads(1)
    spent: list[float] = []

    def timed(call: Any) -> Any:
        def measured(progress: Progress) -> Any:
            begun = time.perf_counter()
            found = call(progress)
            spent.append(time.perf_counter() - begun)
            return found

        return measured

    calls = Progress.begin_save, Progress.save
    Progress.begin_save, Progress.save = map(timed, calls)  # type: ignore[method-assign]
    settings = {
        **SETTINGS,
        "team": {"agents": 2, "sharing": "shared", "sampling": {"max_tokens": 16}},
        "training": {"steps": STEPS, "tasks_per_step": 2},
        "checkpoint": {"every": 1, "background": background},
    }
    rows = []
    try:
        with (
            tempfile.TemporaryDirectory() as place,
            Trainer(**settings, run_dir=Path(place) / "run") as trainer,
        ):
            began, cpu = time.perf_counter(), time.process_time()
            for step in trainer.steps():
                now, used = time.perf_counter(), time.process_time()
                rows.append({"foreground": spent[-1], "step": now - began, "cpu": used - cpu})
                began, cpu = now, used
                del step
    finally:
        Progress.begin_save, Progress.save = calls  # type: ignore[method-assign]
    return rows[FIRST:]


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
