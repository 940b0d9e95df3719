"""Plan the memory of a run: whether the run fits in memory, and which settings to change if it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kapelle.cluster.planning import questions
from kapelle.cluster.planning.memory import Process, processes
from kapelle.cluster.planning.planned_run import PlannedRun, planned_run
from kapelle.cluster.planning.weights_map import WeightsMap, weights_map
from kapelle.engines.train.pass_size import chosen_tokens, token_bytes
from kapelle.models.renderer import light_renderer
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import load_recipe
from kapelle.team import Place

OF_PASSES = ("activations", "logits")
"""Kinds of memory that the passes of an update use."""
SMALL = 256
"""Minimum number of tokens of a microbatch that the advice suggests."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of a setting, with the memory of the fullest device after this change and all earlier changes."""

    setting: str
    costs: str
    peak: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The planned memory of a run."""

    weights: WeightsMap
    processes: tuple[Process, ...]
    memory: int | None
    """Memory of a device in bytes, or None if there is no limit."""
    advice: tuple[Advice, ...]
    """Changes of settings after which the run fits in memory, cheapest first. Empty if the run already fits or if no change helps."""
    run: PlannedRun

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory for its processes. True if there is no limit."""
        return self.memory is None or max(self.devices.values()) <= self.memory

    @property
    def devices(self) -> Mapping[str, int]:
        """Mapping from each device to the total peak memory of its processes in bytes."""
        return held_by_device(self.processes)

    def row(self) -> dict[str, Any]:
        """Return the plan as a JSON object, with memory in bytes and lengths in tokens."""
        work = self.run.work
        return {
            "fits": self.fits,
            "memory": self.memory,
            "devices": dict(self.devices),
            "processes": [
                {
                    "name": process.name,
                    "device": process.device,
                    "count": process.count,
                    "peak": process.peak,
                    "worst": process.worst.name,
                    "phases": {phase.name: {**phase.kinds, "total": phase.total} for phase in process.phases},
                }
                for process in self.processes
            ],
            "advice": [asdict(each) for each in self.advice],
            "step": {
                "tasks": work.tasks,
                "episodes of a task": work.group,
                "answers of an episode": [asdict(turn) for turn in work.turns],
                "longest text": work.longest,
                "worlds opened": work.played,
            },
            "judges": questions.rows(self.run.asked, work.tasks, work.group),
            "computing": {
                base: {
                    "device": self.run.device(base),
                    "dtype": place.dtype,
                    "tf32": self.run.config.model.tf32 and not self.run.cpu(base),
                    "tokens of a pass": self.run.pass_tokens(base),
                    "chosen": self.run.left_open,
                }
                for base, place in self.run.places.items()
            },
            "weights": self.weights.row(),
        }


def plan(
    recipe: str | RunConfig,
    *settings: str,
    gpu_memory: float | None = None,
    ranks: int = 1,
    real: bool = False,
) -> Plan:
    """Return the memory plan of a recipe (with `key.path=value` settings), without loading a model.

    The argument `gpu_memory` is the memory of each GPU in GB (10⁹ bytes). If `gpu_memory` is given, base models without a specified
    device are planned for a GPU, and otherwise for a CPU. With several `ranks`, the plan describes one process with its own GPU.
    Raises the same errors as the run itself, except for missing packages and devices.
    """
    config = recipe if isinstance(recipe, RunConfig) else load_recipe(recipe, (), settings, real=real).config
    prepared = prepare(config, elsewhere=True, renderer_of=light_renderer)
    memory = None if gpu_memory is None else int(gpu_memory * 10**9)
    run = planned_run(prepared, "cpu" if memory is None else "cuda", ranks)
    if memory is not None:
        run = with_chosen_tokens(run, memory)
    mapped = weights_map(prepared.team, prepared.outlines, run.nf4)
    found = tuple(processes(run))
    return Plan(mapped, found, memory, () if memory is None else advice(run, memory), run)


def held_by_device(found: Iterable[Process]) -> dict[str, int]:
    """Return a mapping from each device to the total peak memory of its processes in bytes."""
    devices: dict[str, int] = {}
    for process in found:
        devices[process.device] = devices.get(process.device, 0) + process.count * process.peak
    return devices


def peak(run: PlannedRun) -> int:
    """Return the peak memory of the fullest device in bytes."""
    return max(held_by_device(processes(run)).values())


def with_chosen_tokens(run: PlannedRun, memory: int) -> PlannedRun:
    """Return a run with the pass sizes that the engine will choose on GPUs with this `memory` in bytes, if the setting is `auto`."""
    if not run.left_open:
        return run
    taken = {
        process.device: sum(
            size
            for phase in process.phases
            for kind, size in phase.kinds.items()
            if phase.name == "update" and kind not in OF_PASSES
        )
        for process in processes(with_passes(run, 1))
        if process.name == "training"
    }
    chosen = {
        base: chosen_tokens(
            memory - taken[run.device(base)],
            token_bytes(outline.layers, outline.hidden, run.size(base), recompute=run.checkpointing),
        )
        for base, outline in run.outlines.items()
        if not run.cpu(base)
    }
    return replace(run, chosen_tokens=chosen)


def with_passes(run: PlannedRun, tokens: int) -> PlannedRun:
    """Return a run in which passes have at most `tokens` tokens."""
    return replace(run, microbatch_tokens=tokens, chosen_tokens={}, left_open=False)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, or 0 if no number fits.

    If a number fits, all smaller numbers must also fit.
    """
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, high * 2
    high = min(high, most)
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def advice(run: PlannedRun, memory: int) -> tuple[Advice, ...]:
    """Return cumulative changes of settings after which a run fits in memory.

    If the changes are not sufficient, return all changes that reduce the memory.
    """
    found: list[Advice] = []
    while peak(run) > memory:
        now = peak(run)
        better = next((each for each in _changes(run, memory) if peak(each[2]) < now), None)
        if better is None:
            break
        setting, costs, run = better
        found = [each for each in found if each.setting.partition("=")[0] != setting.partition("=")[0]]
        filled = setting.format(microbatch=run.microbatch_tokens, rows=run.max_rows)
        found.append(Advice(filled, costs, peak(run)))
    return tuple(found)


def _changes(run: PlannedRun, memory: int) -> Iterator[tuple[str, str, PlannedRun]]:
    """Yield each possible change, its cost and the run after the change, cheapest first."""
    if not run.checkpointing:
        costs = "an update takes about 50 % longer; the same gradients"
        checkpointed = with_chosen_tokens(replace(run, checkpointing=True), memory)
        yield "training.gradient_checkpointing=true", costs, checkpointed
    # The largest passes that fit, or that need no more memory than the smallest.
    most_tokens = max(run.pass_tokens(base) for base in run.shapes)
    least = min(SMALL, most_tokens)
    enough = max(memory, peak(with_passes(run, least)))
    tokens = _largest(most_tokens, lambda count: peak(with_passes(run, count)) <= enough)
    smaller = with_passes(run, max(tokens, least))
    yield "training.microbatch_tokens={microbatch}", "more passes; the same gradients", smaller
    if run.engine == "local" and run.algorithm.collects_episodes:
        # The most rows that fit, or that need no more memory than one row.
        most = max(memory, peak(replace(run, max_rows=1)))
        rows = _largest(run.max_rows, lambda count: peak(replace(run, max_rows=count)) <= most)
        yield (
            "engine.max_rows={rows}",
            "slower sampling; the same answers",
            replace(run, max_rows=max(rows, 1)),
        )
        yield "engine.kept_tokens=0", "later turns read their prompts again", replace(run, kept_tokens=0)
    if any(place.dtype == "float32" for place in run.places.values()):
        places = {
            base: Place("bfloat16", place.device) if place.dtype == "float32" else place
            for base, place in run.places.items()
        }
        costs = "rounding; weights that train stay in float32"
        yield "model.dtype=bfloat16", costs, replace(run, places=places)
    codes = frozenset(
        base
        for base, path in run.team.bases.items()
        if path != "embedded" and base not in run.team.trained_bases
    )
    if codes - run.nf4:
        shapes = {
            base: replace(shape, flat=shape.flat and base not in codes) for base, shape in run.shapes.items()
        }
        costs = "other weights, slower; needs CUDA and kapelle[quantised]"
        yield "model.quantization=nf4", costs, replace(run, nf4=codes, shapes=shapes)
    if run.team.trained_bases and run.optimizer == "adamw":
        costs = "rounded moments; needs CUDA and kapelle[quantised]"
        yield "optimizer.name=adamw_8bit", costs, replace(run, optimizer="adamw_8bit")
