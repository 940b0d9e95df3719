"""Memory by process, device, phase and kind: the bytes of a run at the peak of each phase.

Answers are assumed to have their maximum length, and passes are as full as the lengths allow. A phase's peak is the moment with the
largest sum, so that its kinds add up. Bases sample at the same time, and are updated one after another.

These kinds are resident from step to step:

weights      4 bytes if they train; frozen ones in the compute type; in nf4 the linear layers of a frozen base take half a byte, a byte of
             scale for 64 weights and four bytes for 256 scales; adapters, critics' heads and references of adapters are in float32; a
             reference of whole weights is a second copy; on a GPU, several adapters of a base are stacked twice in the compute type
judges       weights and adapters of the environment's frozen judges, in the process that rolls out; their answers do not count
gradients    4 bytes for each number that trains, from an update's first pass to its step
optimiser    the two moments of AdamW: 8 bytes; 8-bit moments take 2 bytes and two scales of four bytes for 256 numbers

Under `fsdp` each of several processes keeps its part of the bases, of their gradients and of their moments. Between updates it also keeps
whole copies of the bases that sample. A pass gathers the weights outside the blocks (embeddings, head) and one block, or two on a GPU. The settings
of `fsdp` (offloading, types, tensor parallelism) are not planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kapelle.cluster.planning.planned_run import PlannedRun, base_bytes
from kapelle.cluster.planning.sampling_memory import sampling_moments
from kapelle.cluster.planning.update_memory import update_moments

PROCESS = 470_000_000
"""Bytes of a process with Python, torch and transformers but without a model; measured on a CPU."""
TOKENIZER, MASKS = 1400, 1200
"""Additional bytes of a process on a CPU for each token of a model's vocabulary: its tokeniser, and the code that computes masks of
constrained completions; measured with a vocabulary of 262,144. kapelle's small embedded model has neither."""
CONTEXT = 600_000_000
"""Bytes of a device for CUDA and its libraries; an assumption."""
COPIED_AT_MOST = 1 << 30
"""`training/loop.py`: maximum bytes of learners that are copied before an update of several steps."""
STACKS = 2
"""`models/fast/routed_linear.py`: copies of grouped adapters in the compute type."""

MOMENTS = {"adamw": 8.0, "adamw_8bit": 2 + 2 * 4 / 256, "paged_adamw_8bit": 2 + 2 * 4 / 256}
"""`optimizer.name` → bytes of the moments of a number that trains; 2110.02861 for 8-bit moments."""

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
    """The peak of a phase in one process on one device."""

    name: str
    """`sampling`, `update` or `evaluation`."""
    kinds: Kinds

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.kinds.values())


@dataclass(frozen=True, slots=True)
class Process:
    """The memory of one process on one device."""

    name: str
    device: str
    phases: tuple[Phase, ...]
    count: int = 1
    """Number of equal processes on that device: all processes of a run on a CPU, one on a GPU."""

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
    if run.shares_weights:
        gathered = max((_gathered_bytes(run, base) for base in bases), default=0)
        parts = sum(run.part(size) for base, size in base_copies(run) if base in bases)
        learning = {**resident, "weights": parts + gathered}
    left: Kinds = {}
    if run.engine == "local" and device == "cpu" and not run.overlap:
        # The merged weights for sampling stay in memory during an update.
        merged = [
            next(sampling_moments(run, base, 1, 1))["merged weights"]
            for base in bases
            if any(run.team.policies[turn.policy].base == base for turn in run.work.turns)
        ]
        left = {"merged weights": sum(merged)} if merged else {}
    if run.algorithm.collects_episodes and not run.overlap:
        yield Phase("sampling", _vllm(run, bases, _added(resident, *_sampling(run, bases, run.own_tasks))))
    yield Phase("update", _worst(_added(learning, left, kinds) for kinds in _update(run, bases, device)))
    if run.problems:
        sampled = _sampling(run, bases, -(-run.problems // run.ranks), 1)
        yield Phase("evaluation", _vllm(run, bases, _added(resident, *sampled)))


def _sampling(run: PlannedRun, bases: Sequence[str], tasks: int, group: int | None = None) -> list[Kinds]:
    """Return the peak of sampling on each base; see `_vllm` for vLLM."""
    if run.engine != "local":
        return []
    found = [list(sampling_moments(run, base, tasks, group or run.work.group)) for base in bases]
    return [_worst(moments) for moments in found if moments]


def _judges(run: PlannedRun, device: str) -> Kinds:
    """Return the memory of the judges on a device."""
    return {"judges": run.judges[device]} if device in run.judges else {}


def _resident(run: PlannedRun, bases: Sequence[str], device: str, *, learns: bool) -> Kinds:
    """Return the memory that is always resident; a process that only samples has only weights."""
    return {
        "process": PROCESS + vocabulary_bytes(run, bases) if device == "cpu" else CONTEXT,
        "weights": sum(_sampled_bytes(run, base, size) for base, size in base_copies(run) if base in bases),
        "adapters": sum(adapter_bytes(run, base) for base in bases),
        "references": sum(reference_bytes(run, base) for base in bases) if learns else 0,
        "optimiser": sum(moment_bytes(run, base) for base in bases) if learns else 0,
    }


def vocabulary_bytes(run: PlannedRun, bases: Sequence[str]) -> int:
    """Return the bytes of the tokenisers of some bases, and of their masks if agents are constrained."""
    found = 0
    for path in {run.team.bases[base] for base in bases} - {"embedded"}:
        own = [base for base in bases if run.team.bases[base] == path]
        constrained = any(
            agent.sampling.constraint and run.team.policy(agent.name).base in own for agent in run.team.agents
        )
        found += (TOKENIZER + MASKS * constrained) * run.shapes[own[0]].vocabulary
    return found


def _update(run: PlannedRun, bases: Sequence[str], device: str) -> Iterator[Kinds]:
    """Yield the moments of an update: the passes of each base in turn, and the steps of the optimisers."""
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
    """Return the moment with the largest sum."""
    nothing: Kinds = {}
    return max(moments, key=lambda kinds: sum(kinds.values()), default=nothing)


def _sampled_bytes(run: PlannedRun, base: str, size: int) -> int:
    """Return the bytes of a base of `size` bytes between updates."""
    if not run.shares_weights:
        return size
    samples = any(policy.base == base for policy in run.team.every.values() if policy.endpoint is None)
    return run.part(size) + samples * _gathered_size(run, base) * run.outlines[base].parameters


def _gathered_size(run: PlannedRun, base: str) -> int:
    """Return the bytes of a gathered weight."""
    return 4 if base in run.team.trained_bases else run.size(base)


def _gathered_bytes(run: PlannedRun, base: str) -> int:
    """Return the bytes of the weights that a pass over a base gathers at once."""
    shape = run.shapes[base]
    at_once = min(shape.depth, 1 if run.cpu(base) else 2)
    numbers = run.outlines[base].parameters - shape.block + at_once * shape.block // shape.depth
    return _gathered_size(run, base) * numbers


def base_copies(run: PlannedRun) -> Iterator[tuple[str, int]]:
    """Yield every base in memory with its bytes; frozen bases with the same path and device count once."""
    seen: set[tuple[str, object]] = set()
    for base, path in run.team.bases.items():
        if base in run.team.trained_bases:
            yield base, 4 * run.outlines[base].parameters
        elif (path, run.places[base]) not in seen:
            seen.add((path, run.places[base]))
            yield base, base_bytes(run.outlines[base], run.size(base), nf4=base in run.nf4)


def adapter_bytes(run: PlannedRun, base: str) -> int:
    """Return the bytes of all adapters and heads on a base, with references."""
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
    """Return the bytes of references and embedders of a base with trained weights."""
    if base not in run.team.trained_bases:
        return 0
    return run.part((run.references + run.embedders) * 4 * run.outlines[base].parameters)


def moment_bytes(run: PlannedRun, base: str) -> int:
    """Return the bytes of the optimisers' state on a base."""
    return int(MOMENTS[run.optimizer] * sum(run.trained_numbers(base)))
