"""Memory by process, device, phase and kind: what a run holds at the worst moment of each phase.

Answers are taken to be as long as they may be, and passes to be as full as the lengths allow. A phase's worst moment is
the one with the largest sum, so that its kinds add up; bases sample at the same time, and are updated one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kapelle.planning.held import adapters, copies, moments, trained, whole_copies
from kapelle.planning.sampling import sampling_moments
from kapelle.planning.situation import Situation
from kapelle.planning.update import update_moments

PROCESS = 470_000_000
"""Bytes of a process with Python, torch and transformers before a model is loaded; on a CPU, as measured."""
CONTEXT = 600_000_000
"""Bytes of a device that CUDA and its libraries take; an allowance, not measured here."""
HELD = 1 << 30
"""`training/step_start.py`: most bytes of learners that are copied before an update of several steps."""

KINDS = (
    "process",
    "weights",
    "adapters",
    "references",
    "optimiser",
    "gradients",
    "keys and values",
    "merged weights",
    "activations",
    "logits",
    "copies",
    "vLLM",
)
Kinds = Mapping[str, int]
"""Kind → bytes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The worst moment of a phase in one process on one device."""

    name: str
    """`sampling`, `update` or `evaluation`."""
    kinds: Kinds

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class Process:
    """What one process holds on one device."""

    name: str
    device: str
    phases: tuple[Phase, ...]

    @property
    def worst(self) -> Phase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes of the worst phase."""
        return self.worst.total


def processes(now: Situation) -> list[Process]:
    """Return every process of a run, device by device."""
    found = []
    for device in dict.fromkeys(now.device(base) for base in now.shapes):
        bases = [base for base in now.shapes if now.device(base) == device]
        found.append(Process("training", device, tuple(_training(now, bases, device))))
        if now.overlap:
            kinds = _added(_held(now, bases, device, learns=False), *_sampling(now, bases, now.work.tasks))
            found.append(Process("sampling process", device, (Phase("sampling", _vllm(now, bases, kinds)),)))
    if now.engine == "vllm" and now.served == "start" and not now.overlap:
        device = next(iter(now.shapes and map(now.device, now.shapes)))
        kinds = {"process": CONTEXT, "weights": _frozen(now), "vLLM": _vllm_bytes(now)}
        found.append(Process("vLLM server", device, (Phase("sampling", kinds),)))
    return found


def _training(now: Situation, bases: Sequence[str], device: str) -> Iterator[Phase]:
    held = _held(now, bases, device, learns=True)
    local = now.engine == "local"
    left = _left(now, bases) if local and device == "cpu" and not now.overlap else {}
    if now.plays and not now.overlap:
        yield Phase("sampling", _vllm(now, bases, _added(held, *_sampling(now, bases, now.work.tasks))))
    yield Phase("update", _worst(_added(held, left, kinds) for kinds in _update(now, bases, device)))
    if now.problems:
        yield Phase("evaluation", _vllm(now, bases, _added(held, *_sampling(now, bases, now.problems, 1))))


def _sampling(now: Situation, bases: Sequence[str], tasks: int, group: int | None = None) -> list[Kinds]:
    """Return the worst moment of sampling on each base; other engines than ours are counted apart."""
    if now.engine != "local":
        return []
    found = [list(sampling_moments(now, base, tasks, group or now.work.group)) for base in bases]
    return [_worst(moments) for moments in found if moments]


def _left(now: Situation, bases: Sequence[str]) -> Kinds:
    """Return what sampling leaves in memory during an update on a CPU: merged weights."""
    return _added(
        *(
            {"merged weights": next(sampling_moments(now, base, 1, 1))["merged weights"]}
            for base in bases
            if any(now.team.policies[said.policy].base == base for said in now.work.said)
        )
    )


def _held(now: Situation, bases: Sequence[str], device: str, *, learns: bool) -> Kinds:
    """Return what is held all the time; a process that only samples has weights alone."""
    return {
        "process": PROCESS if device == "cpu" else CONTEXT,
        "weights": sum(size for base, size in copies(now) if base in bases),
        "adapters": sum(adapters(now, base) for base in bases),
        "references": sum(whole_copies(now, base) for base in bases) if learns else 0,
        "optimiser": sum(moments(now, base) for base in bases) if learns else 0,
    }


def _update(now: Situation, bases: Sequence[str], device: str) -> Iterator[Kinds]:
    """Yield the moments of an update: the passes of each base in turn, and the optimisers' steps."""
    numbers = {base: sum(trained(now, base)) for base in bases}
    state = sum(4 * numbers[base] + moments(now, base) for base in bases)
    held = {"copies": state} if now.often and device == "cpu" and state <= HELD else {"copies": 0}
    for base in bases:
        others = {"gradients": sum(4 * numbers[other] for other in bases if other != base)}
        for kinds in update_moments(now, base):
            yield _added(held, others, kinds)
    most = max((count for base in bases for count in trained(now, base)), default=0)
    share = most / sum(numbers.values()) if most else 0
    yield _added(held, {"gradients": 4 * sum(numbers.values()), "copies": int(now.skips * share * state)})


def _vllm(now: Situation, bases: Sequence[str], kinds: Kinds) -> Kinds:
    """Add what vLLM holds in this process while it samples: its own weights, and room for keys and values."""
    if now.engine != "vllm" or now.served:
        return kinds
    own = sum(now.size(base) * now.outlines[base].parameters for base in bases)
    return _added(kinds, {"vLLM": own + int(now.kv_gib * (1 << 30)) * len(bases)})


def _frozen(now: Situation) -> int:
    return sum(now.size(base) * now.outlines[base].parameters for base in now.shapes)


def _vllm_bytes(now: Situation) -> int:
    return int(now.kv_gib * (1 << 30)) * len(now.shapes)


def _added(*parts: Kinds) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for kind, count in part.items():
            total[kind] = total.get(kind, 0) + count
    return total


def _worst(moments: Iterable[Kinds]) -> Kinds:
    """Return the moment with the largest sum."""
    nothing: Kinds = {}
    return max(moments, key=lambda kinds: sum(kinds.values()), default=nothing)
