"""Whether an episode costs the same whether 16 or 2,048 are in flight, and what memory they take."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, Self

from benchmarks.measure import cpu_seconds, single_thread
from benchmarks.ours import grpo_trainer
from benchmarks.subjects import subject
from kapelle.rollout.episodes import rollout

COUNTS = (16, 64, 256, 1024, 2048)
SAMPLES, NEW, PROMPT = 8, 32, 32


def run() -> dict[str, Any]:
    """Return CPU-milliseconds and peak extra memory per episode for each count."""
    single_thread()
    trainer = grpo_trainer(subject("1M"), {"agents": 2}, 2, SAMPLES, NEW, PROMPT)
    setup, rows = trainer.setup, {}
    _episodes(setup, COUNTS[0])
    for count in COUNTS:
        gc.collect()
        before = _resident()
        with _Peak() as peak:
            seconds = cpu_seconds(partial(_episodes, setup, count))
        rows[str(count)] = {
            "cpu_ms_per_episode": 1000 * seconds / count,
            "extra_mb": (peak.bytes - before) / 1e6,
            "extra_kb_per_live_token": (peak.bytes - before) / 1e3 / (count * 2 * (PROMPT + NEW)),
        }
    return rows


def _episodes(setup: Any, count: int) -> None:
    tasks = [setup.environment.task("train", k) for k in range(count // SAMPLES)]
    groups = asyncio.run(rollout(setup, tasks, SAMPLES, seed=count))
    turns = [turn for group in groups for episode in group.episodes for turn in episode.turns]
    assert len(turns) == 2 * count, "two agents speak in every episode"


class _Peak:
    """The largest resident size while it is open, looked at every ten milliseconds."""

    def __enter__(self) -> Self:
        self.bytes, self._open = _resident(), True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._open:
            self.bytes = max(self.bytes, _resident())
            time.sleep(0.01)

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096
