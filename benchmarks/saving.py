"""How long a step waits for its checkpoint: one that is written at once, against one that is written in the background.

    python -m benchmarks.saving

One process trains all weights (9.3 M: 112 MB of weights and moments, and the model once more in `policies/`) and saves them in
turns in either way. `foreground` is for how long training does not continue, `until_sealed` when the checkpoint counts, `cpu` the
seconds of the processor that it takes in all. Ratios are those of the background over waiting.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ranks import SETTINGS

SAVES = 4


def run() -> dict[str, Any]:
    """Return the median seconds of either way, and their ratios."""
    import torch

    from kapelle import Trainer

    torch.set_num_threads(1)
    settings = {
        **SETTINGS,
        "team": {"agents": 2, "sharing": "shared", "sampling": {"max_tokens": 4}},
        "algorithm": {"name": "grpo", "group_size": 2},
        "training": {"steps": 1, "tasks_per_step": 1},
        "checkpoint": {"every": 2},
    }
    rows: dict[str, list[dict[str, float]]] = {"waiting": [], "background": []}
    with tempfile.TemporaryDirectory() as place, Trainer(**settings, run_dir=Path(place) / "run") as trainer:
        list(trainer.steps())
        progress = trainer._progress
        for _ in range(SAVES):
            rows["waiting"].append(_timed(progress.save))
            rows["background"].append(_timed(progress.begin_save, lambda: progress.settle(wait=True)))
    medians = {
        way: {name: statistics.median(row[name] for row in own) for name in own[0]}
        for way, own in rows.items()
    }
    ratios = {name: medians["background"][name] / seconds for name, seconds in medians["waiting"].items()}
    return {"seconds": medians, "ratios": ratios}


def _timed(begin: Any, end: Any = lambda: None) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    begin()
    foreground = time.perf_counter() - began
    end()
    return {
        "foreground": foreground,
        "until_sealed": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
