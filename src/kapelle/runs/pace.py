"""Says which phase takes most of a step's time, and which setting to change, based on the metrics of the last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from kapelle.runs.timeline import ACTIVITIES

STEPS = 20
"""The maximum number of steps over which times are averaged."""
LEAST = 3
"""The minimum number of steps of a run. The first step is excluded, because it contains compilation and other start-up costs."""
DOMINATES = 0.5
"""The minimum share of a phase that dominates a step."""
OVERLAPS = 0.2
"""The minimum share of the other phase for which sampling during updates is recommended."""
FEW_ROWS = 256
"""Below this number of rows, another row makes a decoding step only slightly longer (`docs/performance.md`)."""

LARGE = 1e12
"""The bound of plausible values. Other values, which damaged files may contain, are ignored."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How the time of the last steps is divided into phases."""

    steps: int
    """The number of steps that were averaged."""
    seconds: float
    """The mean duration of a step in seconds."""
    shares: Mapping[str, float]
    """The share of each phase, in the order in which phases occur in a step. The shares add up to 1."""
    change: str = ""
    """What to change in order to shorten the phase that dominates. The text is empty if no phase dominates."""

    def line(self) -> str:
        """Return a sentence with the phase that dominates and what to change. The sentence is empty if no phase dominates."""
        phase, share = max(self.shares.items(), key=lambda each: each[1])
        took = f"`{phase}` takes {100 * share:.0f} % of a step ({share * self.seconds:.3g} of {self.seconds:.3g} s)"
        return f"{took}: {self.change}" if self.change else ""


def pace_of(
    columns: Mapping[str, Sequence[float | None]], settings: Mapping[str, Any], steps: int = STEPS
) -> Pace | None:
    """Return the times of the last steps, or None if too few steps have times.

    `columns` contains the values of each metric by step, and `settings` the resolved settings of the run.
    """
    count = min(steps, max(map(len, columns.values()), default=0) - 1)

    def mean(name: str) -> float:
        values = [
            value for value in columns.get(name, ())[1:][-count:] if value is not None and 0 <= value < LARGE
        ]
        return fmean(values) if values else 0.0

    parts = {name: mean(f"time/{name}") for name in (*ACTIVITIES, "idle") if f"time/{name}" in columns}
    total = sum(parts.values())
    if count < LEAST - 1 or total <= 0:
        return None
    shares = {name: spent / total for name, spent in parts.items()}
    phase = max(shares, key=lambda name: shares[name])
    tokens = sum(mean(name) for name in columns if name.startswith("tokens/"))
    change = _change(phase, shares, settings, mean("samples"), tokens) if shares[phase] >= DOMINATES else ""
    return Pace(count, total, shares, change)


def _change(
    phase: str, shares: Mapping[str, float], settings: Mapping[str, Any], episodes: float, tokens: float
) -> str:
    """Return what to change if `phase` dominates a step with so many episodes and sampled tokens."""

    def setting(section: str, name: str) -> Any:
        found = settings.get(section)
        return found.get(name) if isinstance(found, Mapping) else None

    asynchronous = bool(setting("training", "asynchronous"))
    rows, limit = setting("engine", "max_rows"), setting("training", "microbatch_tokens")
    other = {"generate": "update", "update": "generate"}.get(phase, "")
    if phase == "generate" and asynchronous:
        return "the update waits for the sampling process. Raise `training.max_staleness`, or sample with more processes (`ray.rollout_workers`)."
    if phase == "generate" and isinstance(rows, int) and rows < min(FEW_ROWS, episodes):
        return f"a step has {episodes:,.0f} episodes, but at most {rows} are decoded at once. Raise `engine.max_rows`."
    if phase == "generate" and 0 < episodes < FEW_ROWS:
        return f"a step decodes at most {episodes:,.0f} episodes at once, and more rows take little more time. Raise `training.tasks_per_step`."
    if phase in ("score", "update") and isinstance(limit, int) and tokens > limit:
        return f"{tokens:,.0f} sampled tokens need several passes of {limit:,} tokens. Raise `training.microbatch_tokens`, or set it to `auto`."
    if phase == "update" and setting("training", "gradient_checkpointing"):
        return (
            "each block is computed twice. Set `training.gradient_checkpointing: false` if memory suffices."
        )
    if not asynchronous and shares.get(other, 0.0) >= OVERLAPS:
        return f"`{other}` takes {100 * shares[other]:.0f} %, and both can overlap. Set `training.asynchronous: true` with `training.max_staleness: 2`."
    if phase == "generate" and setting("engine", "name") == "local":
        return "on a GPU, compare with `engine.name: vllm`; elsewhere, lower `team.sampling.max_tokens`."
    if phase == "environment" and setting("environment", "name") == "remote":
        return "the environment server takes this time. Add servers (`environment.address` may be a list)."
    if phase in ("environment", "grade"):
        workers = setting("episode", "environment_workers") or 0
        return f"environments and graders run in {workers or 'no'} other processes. Raise `episode.environment_workers`."
    if phase == "publish":
        return "all trained weights are sent to the sampler. Train adapters (`team.sharing: lora`), which are smaller."
    if phase == "idle":
        return "this is time outside of all phases, such as the workflow's own code. Find it with `python -m cProfile -m kapelle train`."
    return "divide the work among more processes (`--launch torchrun --processes N`)."
