"""What bounds a step of a team of language models, from 0.6 to 70 billion weights on 1 to 512 GPUs: formulae, no measurements.

    python -m benchmarks.scale_bounds     # the tables of docs/scaling.md

A step is: decode all answers, read (prefill) what agents hear, update on every token, exchange gradients, publish weights.
Each part takes as long as the busier of arithmetic and bytes, at a stated share of the hardware's peak. Units: bytes, seconds,
floating-point operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

HALF, FLOAT = 2, 4
"""Bytes of a number in bfloat16 and in float32."""
MASTER = 16
"""Bytes of a weight that trains: bfloat16 weight and gradient, float32 weight and two moments."""
RECOMPUTED = 2
"""Operations per weight and token of a second forward pass (activation checkpointing)."""

Kind = Literal["adapters", "one model", "own models"]
"""An adapter for each agent on one frozen base; one model that all agents share; a model for each agent."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with grouped-query attention and a gated feed-forward layer."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int = 151_936
    head_size: int = 128
    tied: bool = False

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's products."""
        query, key = self.heads * self.head_size, self.kv_heads * self.head_size
        up = (self.hidden, self.intermediate)
        attention = ((self.hidden, query), (self.hidden, key), (self.hidden, key), (query, self.hidden))
        return (*attention, up, up, (self.intermediate, self.hidden))

    @property
    def read(self) -> int:
        """Weights that every token is multiplied with: all layers and the output head."""
        return self.layers * sum(a * b for a, b in self.linears) + self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        """All weights."""
        return self.read + (0 if self.tied else self.vocabulary * self.hidden)

    def adapter(self, rank: int) -> int:
        """Weights of an adapter on all linear layers."""
        return self.layers * rank * sum(a + b for a, b in self.linears)

    @property
    def kept(self) -> int:
        """Bytes that the cache keeps of a token."""
        return 2 * self.layers * self.kv_heads * self.head_size * HALF


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("0.6B", 28, 1024, 16, 8, 3072, tied=True),
        Shape("1.7B", 28, 2048, 16, 8, 6144, tied=True),
        Shape("4B", 36, 2560, 32, 8, 9728, tied=True),
        Shape("8B", 36, 4096, 32, 8, 12_288),
        Shape("14B", 40, 5120, 40, 8, 17_408),
        Shape("32B", 64, 5120, 64, 8, 25_600),
        Shape("70B", 80, 8192, 64, 8, 28_672, vocabulary=128_256),
    )
}
"""Qwen3's dense models (2505.09388) and Llama 3's 70B (2407.21783)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One GPU, its node and its network: an H100 with 400 Gb/s of network for each."""

    flops: float = 989e12
    bandwidth: float = 3.35e12
    memory: float = 80e9
    link: float = 450e9
    """Bytes a second from a GPU to another one of its node."""
    network: float = 50e9
    """The same to another node."""
    per_node: int = 8
    arithmetic: float = 0.4
    """Share of the peak that products reach."""
    traffic: float = 0.6
    """Share of the bandwidths that is reached."""
    latency: float = 10e-6
    """Seconds of one small exchange between the GPUs of a node."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step of a team whose agents speak one after another."""

    agents: int = 4
    turns: int = 2
    """Of each agent in an episode."""
    question: int = 256
    new: int = 512
    """Tokens of an answer; an agent hears the one before."""
    episodes: int = 1024
    rank: int = 16
    """Of an adapter."""

    @property
    def sampled(self) -> int:
        """Tokens that are sampled in one episode, one after another."""
        return self.agents * self.turns * self.new

    @property
    def new_messages(self) -> int:
        """Tokens of an episode that are read without being sampled."""
        return self.agents * (self.question + self.turns * self.new)

    @property
    def context(self) -> float:
        """Tokens that an episode's caches hold on average while it is played."""
        return (self.sampled + self.new_messages) / 2


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step's parts, and what they need."""

    gpus: int
    split: int
    """GPUs over which one copy of the model is spread for decoding; 0 where it fits none."""
    rows: float
    """Episodes that one copy decodes at a time."""
    most_rows: int
    """For how many episodes it has memory."""
    decode: float
    floor: float
    """Seconds of decoding that no further GPU removes: one episode alone, weights read for every token."""
    prefill: float
    update: float
    exchange: float
    """Beyond what the update's arithmetic hides."""
    publish: float

    @property
    def step(self) -> float:
        """Seconds of all parts, one after another."""
        return self.decode + self.prefill + self.update + self.exchange + self.publish

    @property
    def largest(self) -> str:
        """The part that takes longest."""
        names = ("decode", "prefill", "update", "exchange", "publish")
        return max(names, key=lambda name: float(getattr(self, name)))


def parts(shape: Shape, kind: Kind, gpus: int, work: Work, machine: Machine) -> Parts | None:
    """Return the parts of a step; None where the model and what trains do not fit into the GPUs' memory."""
    models = work.agents if kind == "own models" else 1
    adapters = work.agents * shape.adapter(work.rank) if kind == "adapters" else 0
    held = MASTER * adapters + (HALF if kind == "adapters" else MASTER) * models * shape.weights
    split = _split(HALF * (models * shape.weights + adapters), machine)
    if held > 0.8 * machine.memory * gpus or split > gpus or split == 0:
        return None
    copies = gpus // split
    room = 0.9 * machine.memory * split - HALF * (models * shape.weights + adapters)
    most_rows = max(1, int(room / (shape.kept * work.context)))
    rows = min(work.episodes / copies, float(most_rows))
    waves = math.ceil(work.episodes / copies / rows)
    decode = waves * work.sampled * _token(shape, kind, rows, split, work, machine)
    rate = machine.flops * machine.arithmetic
    prefill = work.episodes * work.new_messages * 2 * shape.read / (rate * gpus)
    trained = work.episodes * (work.sampled + work.new_messages)
    each = (4 if kind == "adapters" else 6) + RECOMPUTED
    update = trained * each * shape.read / (rate * gpus)
    exchange = _exchange(shape, kind, gpus, adapters, models, trained, machine)
    way = _way(gpus, machine)
    moved = HALF * (adapters if kind == "adapters" else models * shape.weights / split)
    return Parts(
        gpus=gpus,
        split=split,
        rows=rows,
        most_rows=most_rows,
        decode=decode,
        floor=work.sampled * _token(shape, kind, 1.0, split, work, machine),
        prefill=prefill,
        update=update,
        exchange=max(0.0, exchange - (update if kind != "adapters" else 0.0)),
        publish=moved / way if gpus > 1 else moved / (machine.bandwidth * machine.traffic),
    )


def _split(size: float, machine: Machine) -> int:
    """Return over how many GPUs of a node weights of so many bytes are spread, leaving two fifths for caches; 0 if too many."""
    for split in (1, 2, 4, 8):
        if size <= 0.6 * machine.memory * split and split <= machine.per_node:
            return split
    return 0


def _token(shape: Shape, kind: Kind, rows: float, split: int, work: Work, machine: Machine) -> float:
    """Return the seconds in which every row gets one token."""
    weights = HALF * shape.read
    if kind == "own models":  # the rows of an agent are decoded by its own model
        weights *= min(work.agents, math.ceil(rows))
    if kind == "adapters":
        weights += HALF * shape.adapter(work.rank) * min(work.agents, math.ceil(rows))
    moved = weights + rows * work.context * shape.kept
    operations = 2 * rows * shape.read
    busy = max(
        moved / (machine.bandwidth * machine.traffic), operations / (machine.flops * machine.arithmetic)
    )
    return busy / split + (2 * shape.layers * machine.latency if split > 1 else 0.0)


def _way(gpus: int, machine: Machine) -> float:
    """Return the bytes a second that leave a GPU in an exchange of all."""
    return machine.traffic * (machine.link if gpus <= machine.per_node else machine.network)


def _exchange(
    shape: Shape, kind: Kind, gpus: int, adapters: int, models: int, trained: float, machine: Machine
) -> float:
    """Return the seconds of an update's exchange: gradients of adapters once; sharded weights three times a micro-batch."""
    if gpus == 1:
        return 0.0
    share = (gpus - 1) / gpus
    if kind == "adapters":
        return 2 * share * FLOAT * adapters / _way(gpus, machine)
    passes = max(1, math.ceil(trained / models / gpus / 16_384))
    return 3 * share * HALF * models * shape.weights * passes / _way(gpus, machine)


GPUS = (1, 8, 64, 512)


def sizes(work: Work) -> Iterator[list[str]]:
    """Yield what each shape weighs."""
    yield [
        "model",
        "weights (GB)",
        "to train in full (GB)",
        f"adapter, rank {work.rank} (MB)",
        "cache (kB a token)",
    ]
    for shape in SHAPES.values():
        adapter = HALF * shape.adapter(work.rank)
        numbers = (HALF * shape.weights / 1e9, MASTER * shape.weights / 1e9, adapter / 1e6, shape.kept / 1e3)
        yield [shape.name, *(f"{number:,.3g}" for number in numbers)]


def steps(kind: Kind, work: Work, machine: Machine, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield the parts of a step of each shape on each number of GPUs."""
    yield [
        "model",
        "GPUs",
        "rows",
        "decode",
        "floor",
        "prefill",
        "update",
        "exchange",
        "publish",
        "step (s)",
        "longest",
    ]
    for name in names:
        for gpus in GPUS:
            found = parts(SHAPES[name], kind, gpus, work, machine)
            if found is not None:
                yield [name, str(gpus), f"{found.rows:.3g}", *_seconds(found), found.largest]


def _seconds(found: Parts) -> list[str]:
    order = (
        found.decode,
        found.floor,
        found.prefill,
        found.update,
        found.exchange,
        found.publish,
        found.step,
    )
    return [f"{seconds:.2g}" if seconds < 10 else f"{seconds:,.0f}" for seconds in order]


def teams(shape: Shape, gpus: int, work: Work, machine: Machine) -> Iterator[list[str]]:
    """Yield a step of teams of 2 to 16 agents, by how they hold weights."""
    kinds: tuple[Kind, ...] = ("adapters", "one model", "own models")
    yield ["agents", *(f"{kind}: step (s)" for kind in kinds), *(f"{kind}: publish (s)" for kind in kinds)]
    for agents in (2, 4, 8, 16):
        found = [parts(shape, kind, gpus, replace(work, agents=agents), machine) for kind in kinds]
        row = ["does not fit" if each is None else f"{each.step:,.0f}" for each in found]
        yield [str(agents), *row, *("–" if each is None else f"{each.publish:.2g}" for each in found)]


def tables(work: Work | None = None, machine: Machine | None = None) -> dict[str, str]:
    """Return the tables of docs/scaling.md as Markdown, by their titles."""
    work, machine = work or Work(), machine or Machine()
    names = ("0.6B", "8B", "32B", "70B")
    return {
        "What a model weighs": _markdown(sizes(work)),
        "An adapter for each agent": _markdown(steps("adapters", work, machine, names)),
        "One model that all agents share, trained in full": _markdown(
            steps("one model", work, machine, names)
        ),
        "More agents, 8B on 64 GPUs": _markdown(teams(SHAPES["8B"], 64, work, machine)),
    }


def _markdown(rows: Iterator[list[str]]) -> str:
    first, *others = rows
    lines = [first, ["---", *["---:"] * (len(first) - 1)], *others]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def run() -> dict[str, Any]:
    """Return the tables."""
    return dict(tables())


if __name__ == "__main__":
    for title, table in tables().items():
        print(f"### {title}\n\n{table}\n")
