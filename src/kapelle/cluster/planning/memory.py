"""Compute the memory of a run in bytes at the peak of each phase, by process, device and kind of memory.

Completions are assumed to have their maximum length, and passes are assumed to be as full as the lengths allow. The peak of a phase
is the moment with the largest total, so that the kinds of memory add up to this total. Base models sample at the same time, and are
updated one after another.

These kinds of memory are used throughout the run:

weights      Trained weights take 4 bytes each, and frozen weights are stored in the compute type. With nf4, each weight of the linear
             layers of a frozen base model takes half a byte, plus one byte of scale for 64 weights and four bytes for 256 scales.
             Adapters, heads of critics and references of adapters are stored in float32. A reference of a whole base model is a
             second copy. On a GPU, several adapters of a base model are also stacked twice in the compute type.
judges       The weights and adapters of the environment's frozen judges are in the process that rolls out episodes. The memory for
             sampling their replies is not included.
gradients    Each trained parameter takes 4 bytes, from the first pass of an update to the optimiser step.
optimiser    The two moments of AdamW take 8 bytes per parameter. 8-bit moments take 2 bytes, plus two scales of four bytes for 256
             parameters.

With `fsdp`, each process stores its part of the base models, of their gradients and of their moments. Between updates, each process
also stores complete copies of the base models that sample. A pass gathers the weights outside the blocks (embeddings, head) and the
weights of one block (two blocks on a GPU). The settings of `fsdp` (offloading, data types, tensor parallelism) are not taken into
account.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kapelle.cluster.planning.planned_run import PlannedRun, base_bytes
from kapelle.cluster.planning.sampling_memory import sampling_moments
from kapelle.cluster.planning.update_memory import update_moments

PROCESS = 470_000_000
"""Memory in bytes of a process with Python, torch and transformers but without a model, measured on a CPU."""
TOKENIZER, MASKS = 1400, 1200
"""Additional memory in bytes of a process on a CPU for each token of a model's vocabulary: the tokeniser, and the code that computes
masks for constrained decoding. The values were measured with a vocabulary of 262,144 tokens. kapelle's small embedded model needs
neither."""
CONTEXT = 600_000_000
"""Assumed memory in bytes of CUDA and its libraries on a device."""
COPIED_AT_MOST = 1 << 30
"""Maximum number of bytes of learners that are copied before an update with several optimiser steps (`training/loop.py`)."""
STACKS = 2
"""Number of stacked copies of adapters in the compute type (`models/fast/routed_linear.py`)."""

MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 2 * 4 / 256, "paged_adamw_8bit": 2 + 2 * 4 / 256}
"""Mapping from `optimizer.name` to the number of bytes of the moments per trained parameter; 8-bit moments are described in
arXiv:2110.02861."""

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
"""Mapping from each kind of memory to its number of bytes."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The peak memory of one phase in one process on one device."""

    name: str
    """Name of the phase: `sampling`, `update` or `evaluation`."""
    kinds: Kinds

    @property
    def total(self) -> int:
        """Total number of bytes of all kinds of memory."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class Process:
    """The memory of one process on one device, by phase."""

    name: str
    device: str
    phases: tuple[Phase, ...]
    count: int = 1
    """Number of identical processes on the device. On a CPU, this is the number of all processes of a run; on a GPU, it is 1."""

    @property
    def worst(self) -> Phase:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Number of bytes of the phase that needs the most memory."""
        return self.worst.total


def processes(run: PlannedRun) -> list[Process]:
    """Return all processes of a run, grouped by device."""
    found = []
    for device in dict.fromkeys([*map(run.device, run.shapes), *run.judges]):
        bases = [base for base in run.shapes if run.device(base) == device]
        count = run.ranks if device == "cpu" else 1
        found.append(Process("training", device, tuple(_training(run, bases, device)), count))
        if run.asynchronous:
            resident = _resident(run, bases, device, learns=False)
            kinds = _added(resident, _judges(run, device), *_sampling(run, bases, run.own_tasks))
            found.append(Process("sampling process", device, (Phase("sampling", _vllm(run, bases, kinds)),)))
    if run.engine == "vllm" and run.served == "start" and not run.asynchronous:
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
    if not run.asynchronous:
        resident = _added(resident, _judges(run, device))
    learning = resident
    if run.shares_weights:
        gathered = max((_gathered_bytes(run, base) for base in bases), default=0)
        parts = sum(run.part(size) for base, size in base_copies(run) if base in bases)
        learning = {**resident, "weights": parts + gathered}
    left: Kinds = {}
    if run.engine == "local" and device == "cpu" and not run.asynchronous:
        # The merged weights for sampling stay in memory during an update.
        merged = [
            next(sampling_moments(run, base, 1, 1))["merged weights"]
            for base in bases
            if any(run.team.policies[turn.policy].base == base for turn in run.work.turns)
        ]
        left = {"merged weights": sum(merged)} if merged else {}
    if run.algorithm.collects_episodes and not run.asynchronous:
        yield Phase("sampling", _vllm(run, bases, _added(resident, *_sampling(run, bases, run.own_tasks))))
    yield Phase("update", _worst(_added(learning, left, kinds) for kinds in _update(run, bases, device)))
    if run.problems:
        sampled = _sampling(run, bases, -(-run.problems // run.ranks), 1)
        yield Phase("evaluation", _vllm(run, bases, _added(resident, *sampled)))


def _sampling(run: PlannedRun, bases: Sequence[str], tasks: int, group: int | None = None) -> list[Kinds]:
    """Return the peak memory of sampling with each base model; see `_vllm` for vLLM."""
    if run.engine != "local":
        return []
    found = [list(sampling_moments(run, base, tasks, group or run.work.group)) for base in bases]
    return [_worst(moments) for moments in found if moments]


def _judges(run: PlannedRun, device: str) -> Kinds:
    """Return the memory of the environment's judges on a device."""
    return {"judges": run.judges[device]} if device in run.judges else {}


def _resident(run: PlannedRun, bases: Sequence[str], device: str, *, learns: bool) -> Kinds:
    """Return the memory that is used throughout the run. A process that only samples stores only weights."""
    return {
        "process": PROCESS + vocabulary_bytes(run, bases) if device == "cpu" else CONTEXT,
        "weights": sum(_sampled_bytes(run, base, size) for base, size in base_copies(run) if base in bases),
        "adapters": sum(adapter_bytes(run, base) for base in bases),
        "references": sum(reference_bytes(run, base) for base in bases) if learns else 0,
        "optimiser": sum(moment_bytes(run, base) for base in bases) if learns else 0,
    }


def vocabulary_bytes(run: PlannedRun, bases: Sequence[str]) -> int:
    """Return the number of bytes of the tokenisers of base models, and of their token masks if agents have constraints."""
    found = 0
    for path in {run.team.bases[base] for base in bases} - {"embedded"}:
        own = [base for base in bases if run.team.bases[base] == path]
        constrained = any(
            agent.sampling.constraint and run.team.policy(agent.name).base in own for agent in run.team.agents
        )
        found += (TOKENIZER + MASKS * constrained) * run.shapes[own[0]].vocabulary
    return found


def _update(run: PlannedRun, bases: Sequence[str], device: str) -> Iterator[Kinds]:
    """Yield the memory at each moment of an update: the passes of each base model in turn, and the optimiser steps."""
    numbers = {base: sum(run.trained_numbers(base)) for base in bases}
    state = sum(4 * numbers[base] + moment_bytes(run, base) for base in bases)
    copied = {"copies": state} if run.often and device == "cpu" and state <= COPIED_AT_MOST else {"copies": 0}
    for base in bases:
        others = {"gradients": sum(4 * numbers[other] for other in bases if other != base)}
        for kinds in update_moments(run, base):
            yield _added(copied, others, kinds)
    skips = run.config.training.non_finite == "skip"  # a bad step is undone from a copy of its learner
    most = max((count for base in bases for count in run.trained_numbers(base)), default=0)
    share = most / sum(numbers.values()) if most else 0
    yield _added(copied, {"gradients": 4 * sum(numbers.values()), "copies": int(skips * share * state)})


def _vllm(run: PlannedRun, bases: Sequence[str], kinds: Kinds) -> Kinds:
    """Add the weights and the KV cache of vLLM in this process while it samples."""
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
    """Return the moment with the largest total memory."""
    nothing: Kinds = {}
    return max(moments, key=lambda kinds: sum(kinds.values()), default=nothing)


def _sampled_bytes(run: PlannedRun, base: str, size: int) -> int:
    """Return the number of bytes that a base model with `size` bytes uses between updates."""
    if not run.shares_weights:
        return size
    samples = any(policy.base == base for policy in run.team.every.values() if policy.endpoint is None)
    return run.part(size) + samples * _gathered_size(run, base) * run.outlines[base].parameters


def _gathered_size(run: PlannedRun, base: str) -> int:
    """Return the number of bytes per weight that a pass gathers."""
    return 4 if base in run.team.trained_bases else run.size(base)


def _gathered_bytes(run: PlannedRun, base: str) -> int:
    """Return the number of bytes of the weights of a base model that a pass gathers at the same time."""
    shape = run.shapes[base]
    at_once = min(shape.depth, 1 if run.cpu(base) else 2)
    numbers = run.outlines[base].parameters - shape.block + at_once * shape.block // shape.depth
    return _gathered_size(run, base) * numbers


def base_copies(run: PlannedRun) -> Iterator[tuple[str, int]]:
    """Yield every base model in memory with its number of bytes.

    Frozen base models with the same path and device are counted once.
    """
    seen: set[tuple[str, object]] = set()
    for base, path in run.team.bases.items():
        if base in run.team.trained_bases:
            yield base, 4 * run.outlines[base].parameters
        elif (path, run.places[base]) not in seen:
            seen.add((path, run.places[base]))
            yield base, base_bytes(run.outlines[base], run.size(base), nf4=base in run.nf4)


def adapter_bytes(run: PlannedRun, base: str) -> int:
    """Return the number of bytes of all adapters and heads on a base model, including references."""
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
    """Return the number of bytes of the references and embedders of a base model with trained weights."""
    if base not in run.team.trained_bases:
        return 0
    return run.part((run.references + run.embedders) * 4 * run.outlines[base].parameters)


def moment_bytes(run: PlannedRun, base: str) -> int:
    """Return the number of bytes of the optimiser states for a base model."""
    return int(MOMENTS[run.optimizer] * sum(run.trained_numbers(base)))
