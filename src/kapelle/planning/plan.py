"""A plan: what a run will need, what fits, and what to change where it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kapelle.models.renderer import light_renderer
from kapelle.planning.fitting import Advice, Limits, advice, limits
from kapelle.planning.memory import Process, processes
from kapelle.planning.situation import Situation, situation
from kapelle.planning.weights_map import WeightsMap, weights_map
from kapelle.settings.schema import RunConfig
from kapelle.setup.preparation import prepare
from kapelle.setup.recipe import load_recipe
from kapelle.signals.reference import ReferenceLogProbs

if TYPE_CHECKING:
    from kapelle.planning.probe import Times


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will need."""

    weights: WeightsMap
    processes: tuple[Process, ...]
    memory: int | None
    """Bytes of a device; None where no limit was given."""
    limits: Limits | None
    """The largest values that fit, each alone, after the changes that are advised; None without a limit."""
    advice: tuple[Advice, ...]
    """Changes after which it fits, in the order in which they cost least; empty if it fits, or nothing helps."""
    situation: Situation
    times: Times | None = None
    """From a probe; None without one."""

    @property
    def fits(self) -> bool:
        """Whether every device holds its processes; True without a limit."""
        return self.memory is None or max(self.devices.values()) <= self.memory

    @property
    def devices(self) -> Mapping[str, int]:
        """Device → bytes that its processes hold at their worst moments, together."""
        found: dict[str, int] = {}
        for process in self.processes:
            found[process.device] = found.get(process.device, 0) + process.peak
        return found

    def row(self) -> dict[str, Any]:
        """Return it as plain JSON; memory in bytes, lengths in tokens."""
        work = self.situation.work
        return {
            "fits": self.fits,
            "memory": self.memory,
            "devices": dict(self.devices),
            "processes": [_process(process) for process in self.processes],
            "limits": None if self.limits is None else asdict(self.limits),
            "advice": [asdict(each) for each in self.advice],
            "step": {
                "tasks": work.tasks,
                "episodes of a task": work.group,
                "answers of an episode": [asdict(said) for said in work.said],
                "longest text": work.longest,
                "worlds opened": work.played,
            },
            "times": None if self.times is None else {**asdict(self.times), "step": self.times.step},
            "weights": self.weights.row(),
        }


def plan(
    recipe: str | RunConfig,
    *settings: str,
    gpu_memory: float | None = None,
    real: bool = False,
    probed: bool = False,
) -> Plan:
    """Return what a run of a recipe (with `key.path=value` settings) will need; loads no model.

    If it is to be `probed`, a few blocks with random weights are timed on the device at hand; else no torch is loaded.

    `gpu_memory` is that of each GPU in GB (10⁹ bytes); with it, bases that name no device are planned for a GPU, else for this
    machine's processor. Raises the errors that the run would, but for what is installed and which devices are here.
    """
    config = recipe if isinstance(recipe, RunConfig) else load_recipe(recipe, (), settings, real=real).config
    prepared = prepare(config, elsewhere=True, renderer_of=light_renderer)
    memory = None if gpu_memory is None else int(gpu_memory * 10**9)
    now = situation(prepared, "cpu" if memory is None else "cuda")
    mapped = weights_map(
        prepared.team,
        prepared.outlines,
        references=prepared.algorithm.need(ReferenceLogProbs) is not None,
        half=config.model.dtype != "float32",
        nf4=now.nf4,
        optimizer=config.optimizer.name,
    )
    found = tuple(processes(now))
    times = None
    if probed:
        from kapelle.planning.probe import probe

        times = probe(prepared, now)
    if memory is None:
        return Plan(mapped, found, None, None, (), now, times)
    changes, then = advice(now, memory)
    return Plan(mapped, found, memory, limits(then, memory), changes, now, times)


def _process(process: Process) -> dict[str, Any]:
    return {
        "name": process.name,
        "device": process.device,
        "peak": process.peak,
        "worst": process.worst.name,
        "phases": {phase.name: {**phase.kinds, "total": phase.total} for phase in process.phases},
    }
