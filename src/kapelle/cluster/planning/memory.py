"""Memory by process, device, phase and kind: what a run holds at the worst moment of each phase.

Answers are taken to be as long as they may be, and passes to be as full as the lengths allow. A phase's worst moment is
the one with the largest sum, so that its kinds add up; bases sample at the same time, and are updated one after another.

Resident from step to step are

weights      4 bytes where they train; frozen ones in the compute type; linear layers of a frozen base in nf4 as codes of
             half a byte with a scale of one byte for 64 of them, and one of four bytes for 256 scales; adapters, critics' heads
             and references of adapters in float32; a reference of whole weights is a second copy; on a GPU, several adapters of a
             base are stacked twice in the compute type
judges       weights and adapters of the frozen models that an environment asks, in the process that plays, from the first
             question on; their answers are not counted
gradients    4 bytes for each number that trains, from an update's first pass to its step
optimiser    AdamW's two moments: 8 bytes; of the 8-bit ones 2 bytes and two scales of four bytes for 256 numbers

Of several processes under `fsdp` each keeps its part of all bases and frozen copies, of their gradients and their moments; under
`cpu_offload` a GPU holds none of these. Beside the part, the bases that are sampled from are whole while nobody learns; a pass
gathers what lies outside the blocks (embeddings, head), and one block (two on a GPU, which fetches the next), or all of them without
`reshard_after_forward`. Under `tensor_parallel` the model that is sampled from stays whole all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kapelle.cluster.planning.planned_run import BYTES, PlannedRun, base_bytes
from kapelle.cluster.planning.sampling_memory import sampling_moments
from kapelle.cluster.planning.update_memory import update_moments

PROCESS = 470_000_000
"""Bytes of a process with Python, torch and transformers before a model is loaded; on a CPU, as measured."""
CONTEXT = 600_000_000
"""Bytes of a device that CUDA and its libraries take; an allowance, not measured here."""
COPIED_AT_MOST = 1 << 30
"""`training/loop.py`: most bytes of learners that are copied before an update of several steps."""
STACKS = 2
"""`models/fast/routed_linear.py`: most copies in the compute type of all adapters of a base, where several are grouped."""

MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 2 * 4 / 256, "paged_adamw_8bit": 2 + 2 * 4 / 256}
"""Bytes of the moments of a number that trains, by `optimizer.name`; 2110.02861 for those of one byte."""

KINDS = (
    "process",
    "weights",
    "judges",
    "adapters",
    "references",
    "optimiser",
    "gradients",
    "KV cache",
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
    count: int = 1
    """Processes like it on that device: on a CPU all of a run's, while each has a GPU of its own."""

    @property
    def worst(self) -> Phase:
        """The phase with the most bytes."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes of the worst phase."""
        return self.worst.total


def processes(run: PlannedRun) -> list[Process]:
    """Return every process of a run, device by device."""
    found = []
    for device in dict.fromkeys([*map(run.device, run.shapes), *run.judges]):
        bases = [base for base in run.shapes if run.device(base) == device]
        count = run.ranks if device == "cpu" else 1
        found.append(Process("training", device, tuple(_training(run, bases, device)), count))
        if run.overlap:
            resident = _resident(run, bases, device, learns=False)
            kinds = _added(resident, _judges(run, device), *_sampling(run, bases, run.own_tasks))
            found.append(Process("sampling process", device, (Phase("sampling", _vllm(run, bases, kinds)),)))
    if run.engine == "vllm" and run.served == "start" and not run.overlap:
        device = next(iter(run.shapes and map(run.device, run.shapes)))
        weights = sum(run.size(base) * run.outlines[base].parameters for base in run.shapes)
        kinds = {
            "process": CONTEXT,
            "weights": weights,
            "vLLM": int(run.kv_gib * (1 << 30)) * len(run.shapes),
        }
        found.append(Process("vLLM server", device, (Phase("sampling", kinds),)))
    return found


def _training(run: PlannedRun, bases: Sequence[str], device: str) -> Iterator[Phase]:
    resident = _resident(run, bases, device, learns=True)
    if not run.overlap:
        resident = _added(resident, _judges(run, device))
    learning = resident
    if run.shared_out is not None:
        gathered = max((_gathered_bytes(run, base) for base in bases), default=0)
        parts = sum(_part_bytes(run, base, size) for base, size in base_copies(run) if base in bases)
        split = run.shared_out.tensor_parallel > 1  # the sampler's model then stays beside the parts
        learning = {**resident, "weights": (resident["weights"] if split else parts) + gathered}
    left: Kinds = {}
    if run.engine == "local" and device == "cpu" and not run.overlap:
        # What sampling leaves in memory during an update: merged weights.
        merged = [
            next(sampling_moments(run, base, 1, 1))["merged weights"]
            for base in bases
            if any(run.team.policies[turn.policy].base == base for turn in run.work.turns)
        ]
        left = {"merged weights": sum(merged)} if merged else {}
    if run.plays and not run.overlap:
        yield Phase("sampling", _vllm(run, bases, _added(resident, *_sampling(run, bases, run.own_tasks))))
    yield Phase("update", _worst(_added(learning, left, kinds) for kinds in _update(run, bases, device)))
    if run.problems:
        sampled = _sampling(run, bases, -(-run.problems // run.ranks), 1)
        yield Phase("evaluation", _vllm(run, bases, _added(resident, *sampled)))


def _sampling(run: PlannedRun, bases: Sequence[str], tasks: int, group: int | None = None) -> list[Kinds]:
    """Return the worst moment of sampling on each base; other engines than ours are counted apart."""
    if run.engine != "local":
        return []
    found = [list(sampling_moments(run, base, tasks, group or run.work.group)) for base in bases]
    return [_worst(moments) for moments in found if moments]


def _judges(run: PlannedRun, device: str) -> Kinds:
    """Return what judges on a device keep in memory."""
    return {"judges": run.judges[device]} if device in run.judges else {}


def _resident(run: PlannedRun, bases: Sequence[str], device: str, *, learns: bool) -> Kinds:
    """Return what stays in memory all the time; a process that only samples has weights alone."""
    return {
        "process": PROCESS if device == "cpu" else CONTEXT,
        "weights": sum(_sampled_bytes(run, base, size) for base, size in base_copies(run) if base in bases),
        "adapters": sum(adapter_bytes(run, base) for base in bases),
        "references": sum(reference_bytes(run, base) for base in bases) if learns else 0,
        "optimiser": sum(moment_bytes(run, base) for base in bases) if learns else 0,
    }


def _update(run: PlannedRun, bases: Sequence[str], device: str) -> Iterator[Kinds]:
    """Yield the moments of an update: the passes of each base in turn, and the optimisers' steps."""
    numbers = {base: sum(run.trained_numbers(base)) for base in bases}
    state = sum(4 * numbers[base] + moment_bytes(run, base) for base in bases)
    copied = {"copies": state} if run.often and device == "cpu" and state <= COPIED_AT_MOST else {"copies": 0}
    for base in bases:
        others = {"gradients": sum(4 * numbers[other] for other in bases if other != base)}
        for kinds in update_moments(run, base):
            yield _added(copied, others, kinds)
    most = max((count for base in bases for count in run.trained_numbers(base)), default=0)
    share = most / sum(numbers.values()) if most else 0
    yield _added(copied, {"gradients": 4 * sum(numbers.values()), "copies": int(run.skips * share * state)})


def _vllm(run: PlannedRun, bases: Sequence[str], kinds: Kinds) -> Kinds:
    """Add what vLLM holds in this process while it samples: its own weights, and its KV cache."""
    if run.engine != "vllm" or run.served:
        return kinds
    own = sum(run.size(base) * run.outlines[base].parameters for base in bases)
    return _added(kinds, {"vLLM": own + int(run.kv_gib * (1 << 30)) * len(bases)})


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


def _part_bytes(run: PlannedRun, base: str, size: int) -> int:
    """Return the bytes of a base of so many bytes that one process keeps on its device while others compute."""
    return 0 if run.offloads(base) else run.part(size)


def _sampled_bytes(run: PlannedRun, base: str, size: int) -> int:
    """Return the bytes of a base of so many bytes between updates."""
    if run.shared_out is None:
        return size
    spoken = any(policy.base == base for policy in run.team.every.values() if policy.endpoint is None)
    return _part_bytes(run, base, size) + spoken * _gathered_size(run, base) * run.outlines[base].parameters


def _gathered_size(run: PlannedRun, base: str) -> int:
    """Return the bytes of a gathered weight."""
    assert run.shared_out is not None
    held = 4 if base in run.team.trained_bases else run.size(base)
    return min(held, BYTES[run.shared_out.param_dtype])


def _gathered_bytes(run: PlannedRun, base: str) -> int:
    """Return the bytes of what a pass over a base gathers at a time."""
    shape, settings = run.shapes[base], run.shared_out
    assert settings is not None
    at_once = min(shape.depth, 1 if run.cpu(base) else 2) if settings.reshard_after_forward else shape.depth
    numbers = run.outlines[base].parameters - shape.block + at_once * shape.block // shape.depth
    return _gathered_size(run, base) * numbers


def base_copies(run: PlannedRun) -> Iterator[tuple[str, int]]:
    """Yield every base in memory once, with its bytes: frozen ones of one path and place are one."""
    seen: set[tuple[str, object]] = set()
    for base, path in run.team.bases.items():
        if base in run.team.trained_bases:
            yield base, 4 * run.outlines[base].parameters
        elif (path, run.places[base]) not in seen:
            seen.add((path, run.places[base]))
            yield base, base_bytes(run.outlines[base], run.size(base), nf4=base in run.nf4)


def adapter_bytes(run: PlannedRun, base: str) -> int:
    """Return the bytes of all adapters and heads on a base, references' too."""
    team = run.team
    parameters = adapters = heads = 0
    for policy in team.every.values():
        if policy.endpoint is None and policy.base == base and policy.lora is not None:
            copied = 1 + (run.references and policy.trained)
            parameters += copied * run.adapters[policy.name].parameters
            adapters += copied
    for critic in team.critics.values():
        if critic.base == base:
            heads += run.outlines[base].hidden + 1
            if critic.lora is not None:
                parameters += run.adapters[critic.name].parameters
                adapters += 1
    grouped = not run.cpu(base) and adapters > 1
    return (4 + grouped * STACKS * run.size(base)) * parameters + 4 * heads


def reference_bytes(run: PlannedRun, base: str) -> int:
    """Return the bytes of references and embedders of a base whose own weights train."""
    if base not in run.team.trained_bases:
        return 0
    return _part_bytes(run, base, (run.references + run.embedders) * 4 * run.outlines[base].parameters)


def moment_bytes(run: PlannedRun, base: str) -> int:
    """Return the bytes of the optimisers' state on a base."""
    return int(MOMENTS[run.optimizer] * sum(run.trained_numbers(base)))
