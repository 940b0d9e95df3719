"""A step of training as events: who decodes, waits, exchanges, updates and publishes when, and who has nothing to do.

    python -m benchmarks.scale_simulator                       # a 4B team on 1 to 512 GPUs, and which setting to turn
    python -m benchmarks.scale_simulator --model 8B --agents 8 --apart
    python -m benchmarks.scale_simulator --tails               # what `overlap` and `partial_rollouts` gain where some tasks take long
    python -m benchmarks.scale_simulator --swarm               # seconds and tokens of a planner that calls workers in parallel

Costs come from `scale_bounds` for GPUs, or from measurements (`scale_measured`). Lengths of answers, and the seconds that episode states
take, are drawn from a seed. Two layouts: *colocated*, every process samples its groups and then updates its share, as `ddp`
does; *apart*, some processes sample and others update, and sampling runs ahead by `staleness` steps.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import math
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from benchmarks.scale_bounds import SHAPES, Machine, Work, parts


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of the pieces, of one process."""

    token: float
    """Of decoding one token of every row, however many rows there are."""
    row: float
    """More for each row."""
    read: float
    """Of reading one token of a prompt that was not read before."""
    trained: float
    """Of updating on one token."""
    step: float
    """Of an update without any tokens: the optimiser."""
    episode: float = 0.0
    """Of what every process does for every episode of a step: credit, metrics, collating."""
    received: float = 0.0
    """Of handing over and taking one episode, where there are several processes."""
    exchange: float = 0.0
    """Of summing gradients over several processes."""
    publish: float = 0.0
    meeting: float = 0.0
    """Of all processes waiting for one another once."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, by how many."""

    tasks: int = 128
    samples: int = 8
    agents: int = 2
    turns: int = 1
    """Of each agent; agents speak one after another."""
    question: int = 64
    longest: int = 64
    """Most tokens of an answer."""
    mean: float = 64.0
    """Mean tokens of an answer before it is cut at `longest`."""
    tail: float | None = None
    """Standard deviation of the logarithm of a length; None draws geometric lengths, as a fixed chance to stop does."""
    environment: float = 0.0
    """Mean seconds of an episode state's move, drawn from an exponential distribution."""
    together: bool = True
    """Rows continue only when no episode is busy with its world; False lets them continue."""
    processes: int = 1
    samplers: int = 0
    """Processes that only sample; 0 lets all do both."""
    staleness: int = 0
    """Steps by which sampling may run ahead, where samplers are apart."""
    rows: int = 4096
    """Most rows that one process decodes at a time."""
    new_messages: bool = True
    """Whether an agent reads the answer before its own."""


@dataclass(slots=True)
class Played:
    """A process's part of the sampling of a step."""

    decode: float = 0.0
    environment: float = 0.0
    """Seconds in which all rows waited for episode states."""
    tokens: int = 0
    read: int = 0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.decode + self.environment


def lengths(plan: Plan, draw: random.Random) -> int:
    """Return the tokens of one answer."""
    if plan.tail is None:
        chance = 1.0 / plan.mean
        drawn = 1 if chance >= 1 else math.ceil(math.log(1.0 - draw.random()) / math.log1p(-chance))
    else:
        drawn = round(plan.mean * math.exp(plan.tail * draw.gauss(0.0, 1.0) - plan.tail**2 / 2))
    return max(1, min(plan.longest, drawn))


@dataclass(order=True, slots=True)
class _Row:
    """An episode that an agent of it speaks in, by the decode step after which the agent has finished."""

    until: int
    number: int
    turn: int = field(compare=False)
    said: int = field(compare=False)


def sample(plan: Plan, costs: Costs, episodes: int, draw: random.Random) -> Played:
    """Decode so many episodes in one process; an event is the end of an answer or of an episode state's move."""
    played = Played()
    waiting = list(range(episodes))[::-1]
    rows: list[_Row] = []
    out: list[tuple[float, int, int, int]] = []
    """Episode states that move: when they have moved, whose they are, turns taken, tokens said last."""
    steps, now, turns = 0, 0.0, plan.agents * plan.turns

    def join(number: int, turn: int, new_messages: int) -> None:
        nonlocal now
        new = lengths(plan, draw)
        read = (plan.question if turn < plan.agents else 0) + (new_messages if plan.new_messages else 0)
        now += costs.read * read
        played.decode += costs.read * read
        played.read += read
        played.tokens += new
        heapq.heappush(rows, _Row(steps + new, number, turn, new))

    while waiting or rows or out:
        while waiting and len(rows) + len(out) < plan.rows:
            join(waiting.pop(), 0, 0)
        while out and (out[0][0] <= now or not rows or plan.together):
            moved, number, turn, said = heapq.heappop(out)
            played.environment += max(0.0, moved - now)
            now = max(now, moved)
            join(number, turn, said)
        if not rows:
            continue
        # Decode until the next answer ends, or until an episode state has moved.
        each, count = costs.token + costs.row * len(rows), rows[0].until - steps
        if out:
            count = min(count, max(1, math.ceil((out[0][0] - now) / each)))
        steps, now = steps + count, now + count * each
        played.decode += count * each
        while rows and rows[0].until <= steps:
            row = heapq.heappop(rows)
            if row.turn + 1 < turns:
                delay = draw.expovariate(1.0 / plan.environment) if plan.environment else 0.0
                heapq.heappush(out, (now + delay, row.number, row.turn + 1, row.said))
    return played


@dataclass(frozen=True, slots=True)
class Step:
    """The mean of simulated steps."""

    seconds: float
    sampling: float
    environment: float
    """Of the seconds of sampling, those in which the slowest process waited for episode states."""
    update: float
    exchange: float
    publish: float
    idle: float
    """Share of all processes' time in which one waits for others."""
    staleness: float
    tokens: float
    """Sampled in a step."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def simulate(plan: Plan, costs: Costs, steps: int = 8, seed: int = 0) -> Step:
    """Return what a step takes on average."""
    draw = random.Random(seed)
    apart = plan.samplers > 0
    playing = plan.samplers if apart else plan.processes
    learning = plan.processes - plan.samplers
    drawn = [_parts(plan, costs, playing, draw) for _ in range(steps)]
    sampling = [max(part.seconds for part in played) for played in drawn]
    tokens = [sum(part.tokens for part in played) for played in drawn]
    read = [sum(part.read for part in played) for played in drawn]
    many = plan.processes > 1
    episodes = plan.tasks * plan.samples
    shared = episodes * (costs.episode + (costs.received if many else 0.0))
    exchange = (costs.exchange + 2 * costs.meeting) if many else 0.0
    update = [
        shared + costs.step + costs.trained * (t + r) / learning for t, r in zip(tokens, read, strict=True)
    ]
    busy = sum(
        sum(part.seconds for part in played) + learning * spent
        for played, spent in zip(drawn, update, strict=True)
    )
    if apart:
        total, stale = _overlapped(sampling, [u + exchange for u in update], costs.publish, plan.staleness)
    else:
        total, stale = sum(sampling) + sum(update) + steps * (exchange + costs.publish), 0.0
    slowest = [max(played, key=lambda part: part.seconds).environment for played in drawn]
    return Step(
        seconds=total / steps,
        sampling=statistics.fmean(sampling),
        environment=statistics.fmean(slowest),
        update=statistics.fmean(update),
        exchange=exchange,
        publish=costs.publish,
        idle=1.0 - busy / (total * plan.processes),
        staleness=stale,
        tokens=statistics.fmean(tokens),
    )


def _parts(plan: Plan, costs: Costs, processes: int, draw: random.Random) -> list[Played]:
    """Deal whole groups in turn and return what each process samples."""
    dealt = [len(range(rank, plan.tasks, processes)) for rank in range(processes)]
    return [sample(plan, costs, groups * plan.samples, draw) for groups in dealt]


def _overlapped(
    sampling: Sequence[float], update: Sequence[float], publish: float, staleness: int
) -> tuple[float, float]:
    """Return when the last update ends if sampling runs ahead, and by how many updates samples are old on average."""
    played, learned = 0.0, [0.0]
    """When the step before was played; when each number of updates was published."""
    stale = []
    for number, (take, learn) in enumerate(zip(sampling, update, strict=True)):
        began = max(played, learned[max(0, number - staleness)])
        stale.append(number - sum(end <= began for end in learned[1 : number + 1]))
        played = began + take
        learned.append(max(played, learned[-1]) + learn + publish)
    return learned[-1], statistics.fmean(stale)


# -------- Tasks that take long: what is gained by playing ahead, and by leaving unfinished groups to the next step

MARK = 32
"""Tokens of each row between two marks at which processes agree whether a step ends."""
SPLITS = (1 / 2, 3 / 4, 7 / 8)
"""Shares of the processes that sample, of which the best one is taken, where others learn meanwhile."""


@dataclass(slots=True)
class Tale:
    """One episode, which may be left and continued."""

    answers: tuple[int, ...]
    """Tokens of each."""
    turn: int = 0
    """Answers that are complete."""
    begun: int = 0
    """Tokens of the answer in progress."""
    joins: list[int] = field(default_factory=list)
    """Decode step of this play at which each answer joined."""
    over: int = 0
    """Decode step of the last play at which it ended."""

    def read(self, plan: Plan) -> int:
        """Return the tokens that are read before its next answer: what is new, or all of it where it is continued."""
        if self.begun:
            return plan.question + sum(self.answers[: self.turn]) + self.begun
        new_messages = self.answers[self.turn - 1] if plan.new_messages and self.turn else 0
        return (plan.question if self.turn < plan.agents else 0) + new_messages

    def leave(self, step: int) -> None:
        """Go back from its end to a decode step of this play, unless it had ended by then."""
        if self.joins and self.over > step:
            first, begun = self.turn - len(self.joins), self.begun
            # The first answer of this play continued from `begun`.
            number = max(0, bisect.bisect_left(self.joins, step) - 1)
            self.turn, self.begun = first + number, (begun if number == 0 else 0)
            self.begun += max(0, step - self.joins[number])
            if self.begun == self.answers[self.turn]:
                self.turn, self.begun = self.turn + 1, 0
        self.joins = []


def continue_forks(plan: Plan, costs: Costs, tales: Sequence[Tale]) -> list[tuple[int, float, float]]:
    """Play episodes in one process, each to its end; return at which decode steps it was when, and the seconds of a step from there."""
    clock = [(0, 0.0, 0.0)]
    waiting = [place for place, tale in enumerate(tales) if tale.turn < len(tale.answers)][::-1]
    rows: list[tuple[int, int]] = []
    steps, now = 0, 0.0

    def join(place: int, begun: int) -> None:
        nonlocal now
        tale = tales[place]
        now += costs.read * tale.read(plan)
        tale.joins.append(steps)
        heapq.heappush(rows, (steps + tale.answers[tale.turn] - begun, place))

    while waiting or rows:
        while waiting and len(rows) < plan.rows:
            join(waiting[-1], tales[waiting.pop()].begun)
        each, count = costs.token + costs.row * len(rows), rows[0][0] - steps
        clock.append((steps, now, each))
        steps, now = steps + count, now + count * each
        while rows and rows[0][0] <= steps:
            _, place = heapq.heappop(rows)
            tale = tales[place]
            tale.turn += 1
            if tale.turn < len(tale.answers):
                join(place, 0)
            else:
                tale.over = steps
    clock.append((steps, now, 0.0))
    return clock


def at_steps(clock: Sequence[tuple[int, float, float]], steps: Any) -> Any:
    """Return when a process has taken so many decode steps, or when it had nothing left to do, for an array of numbers."""
    began, when, each = np.array(clock).T
    last = np.searchsorted(began, steps, side="right") - 1
    return when[last] + (steps - began[last]) * each[last]


@dataclass(frozen=True, slots=True)
class Tail:
    """What a setting makes of tasks that take long."""

    rate: float
    """Episodes that are learned from, a second."""
    sampling: float
    """Mean seconds of sampling a step."""
    update: float
    staleness: float


def with_tails(
    plan: Plan, costs: Costs, hard: float, share: float, often: int = 1, steps: int = 12, seed: int = 0
) -> Tail:
    """Simulate steps in which all lengths of a task have a lognormal factor, of standard deviation `hard` of the logarithm.

    `share` is `training.partial_rollouts`; a group is left `often` times at most, which `max_staleness` bounds. Samplers of the plan
    play one step ahead.
    """
    playing = plan.samplers or plan.processes
    learning = plan.processes - plan.samplers
    most = max(1, int(share * plan.tasks)) if share else 0
    left: list[list[Tale]] = []
    times_left: list[int] = []
    sampling, update, learned = [], [], 0
    for number in range(steps):
        pool = [*left, *(_tales(plan, hard, f"{seed}/{number}/{task}") for task in range(plan.tasks))]
        times_left += [0] * plan.tasks
        own = [[tale for tales in pool[rank::playing] for tale in tales] for rank in range(playing)]
        clocks = [continue_forks(plan, costs, tales) for tales in own]
        marks = [math.ceil(max(tale.over for tale in tales) / MARK) for tales in pool]
        end, spent = max(marks), max(clock[-1][1] for clock in clocks)
        if share:
            # The groups that may not be left again are waited for, and of the others all but a few.
            must = [mark for mark, count in zip(marks, times_left, strict=True) if count == often]
            end = max([*must, sorted(marks)[len(marks) - most - 1]])
            times = np.stack([at_steps(clock, MARK * np.arange(end + 1)) for clock in clocks])
            spent = float(np.diff(times).max(axis=0).sum()) + end * costs.meeting / 10
        done = [tales for mark, tales in zip(marks, pool, strict=True) if mark <= end]
        left = [tales for mark, tales in zip(marks, pool, strict=True) if mark > end]
        times_left = [count + 1 for mark, count in zip(marks, times_left, strict=True) if mark > end]
        for tales in pool:
            for tale in tales:
                tale.leave(MARK * end)
        episodes = [tale for tales in done for tale in tales]
        tokens = sum(sum(tale.answers) for tale in episodes)
        tokens += sum(
            plan.agents * plan.question + plan.new_messages * sum(tale.answers[:-1]) for tale in episodes
        )
        learned += len(episodes)
        sampling.append(spent)
        update.append(
            len(episodes) * (costs.episode + costs.received) + costs.step + costs.trained * tokens / learning
        )
    each = costs.exchange + 2 * costs.meeting
    if plan.samplers:
        total, stale = _overlapped(sampling, [took + each for took in update], costs.publish, 1)
    else:
        total, stale = sum(sampling) + sum(update) + steps * (each + costs.publish), 0.0
    return Tail(learned / total, statistics.fmean(sampling), statistics.fmean(update), stale)


def _tales(plan: Plan, hard: float, key: str) -> list[Tale]:
    """Return the episodes of a task, whose lengths depend on the key alone."""
    factor = math.exp(hard * random.Random(key).gauss(0.0, 1.0) - hard**2 / 2)
    harder, turns = replace(plan, mean=plan.mean * factor), plan.agents * plan.turns
    draws = [random.Random(f"{key}/{sample}") for sample in range(plan.samples)]
    return [Tale(tuple(lengths(harder, draw) for _ in range(turns))) for draw in draws]


def tails(model: str, agents: int, tail: float, hard: float, share: float = 0.25) -> list[str]:
    """Return a row for each number of GPUs: episodes a second as they come, played ahead, left unfinished, and both."""
    work = Work(agents=agents)
    lines = [
        "| GPUs | tasks | step (s) | episodes/s | `overlap` | left once | left four times | four times and `overlap` |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for gpus in (8, 16, 32, 64, 128, 256, 512):
        found = costs_of(model, work, Machine(), gpus)
        if found is None:
            continue
        costs, split, rows = found
        plan = Plan(
            tasks=max(work.episodes // 8, gpus // split),
            agents=agents,
            turns=work.turns,
            question=work.question,
            longest=16 * work.new,
            mean=work.new,
            tail=tail,
            rows=rows,
            processes=gpus // split,
        )
        splits = sorted({max(1, min(plan.processes - 1, round(part * plan.processes))) for part in SPLITS})

        def best(left: float, plan: Plan = plan, costs: Costs = costs, splits: list[int] = splits) -> float:
            every = [with_tails(replace(plan, samplers=each), costs, hard, left, 4) for each in splits]
            return max(tail.rate for tail in every)

        plain = with_tails(plan, costs, hard, 0.0).rate
        rates = [
            best(0.0),
            *(with_tails(plan, costs, hard, share, often).rate for often in (1, 4)),
            best(share),
        ]
        gains = " | ".join(f"{rate / plain:.2f}×" for rate in rates)
        step = plan.tasks * plan.samples / plain
        lines.append(f"| {gpus} | {plan.tasks} | {step:,.0f} | {plain:.3g} | {gains} |")
    return lines


KNOBS: Mapping[str, Callable[[Plan], Plan]] = {
    "training.tasks_per_step × 2": lambda plan: replace(plan, tasks=2 * plan.tasks),
    "sampling.max_tokens ÷ 2": lambda plan: replace(plan, longest=max(1, plan.longest // 2)),
    "faster worlds (episode.environment_workers)": lambda plan: replace(
        plan, environment=plan.environment / 2
    ),
    "max_staleness + 1, a quarter of the processes apart": lambda plan: replace(
        plan, samplers=3 * plan.processes // 4, staleness=plan.staleness + 1
    ),
    "processes × 2": lambda plan: replace(plan, processes=2 * plan.processes, samplers=2 * plan.samplers),
}
"""Settings to turn → the plan with one turned."""


def swarm_sampling(
    calls: int,
    costs: Costs,
    episodes: int,
    rows: int,
    draw: random.Random,
    *,
    work: int = 4096,
    overhead: int = 128,
    ends: int = 128,
    tail: float = 0.8,
) -> Played:
    """Sample episodes in which a planner divides `work` tokens among `calls` simultaneous calls.

    The planner writes `ends` tokens before and `ends` after the calls. Each call reads and writes `overhead` tokens in addition to its
    share, whose length is lognormal with standard deviation `tail` of the logarithm. An episode continues when all of its calls end.
    """
    played, steps = Played(), 0
    waiting = [(number, ends, 0, True) for number in range(episodes)]
    """Sequences that wait for a row: episode, tokens to write, tokens to read, whether the calls follow."""
    running: list[tuple[int, int, bool]] = []
    """Step at which a sequence ends, its episode, whether the calls follow."""
    missing = [calls] * episodes
    while waiting or running:
        while waiting and len(running) < rows:
            number, new, read, is_plan = waiting.pop()
            played.decode += costs.read * read
            played.read += read
            played.tokens += new
            heapq.heappush(running, (steps + new, number, is_plan))
        played.decode += (running[0][0] - steps) * (costs.token + costs.row * len(running))
        steps, number, is_plan = heapq.heappop(running)
        if is_plan:
            for _ in range(calls):
                length = work / calls * math.exp(tail * draw.gauss(0.0, 1.0) - tail**2 / 2)
                waiting.append((number, overhead + max(1, round(length)), overhead, False))
        elif missing[number] > 0:
            missing[number] -= 1
            if missing[number] == 0:
                waiting.append((number, ends, calls * overhead, False))
    return played


def swarm(model: str) -> list[str]:
    """Return a table of the seconds of sampling on one GPU, and the tokens, for numbers of calls and of episodes."""
    found = costs_of(model, Work(agents=2), Machine(), 1)
    assert found is not None, "the model fits one GPU"
    costs, _, rows = found
    sizes = (1, 16, 256)
    lines = [
        f"| simultaneous calls | tokens | {' | '.join(f'{size} episodes (s)' for size in sizes)} |",
        "| ---: | ---: |" + " ---: |" * len(sizes),
    ]
    base: list[float] = []
    for calls in (1, 2, 4, 8, 16, 32):
        cells, tokens = [], 0.0
        for place, size in enumerate(sizes):
            played = [
                swarm_sampling(calls, costs, size, rows, random.Random(seed))
                for seed in range(64 // size or 1)
            ]
            seconds = statistics.fmean(each.seconds for each in played)
            tokens = statistics.fmean(each.tokens for each in played) / size
            base += [seconds] if calls == 1 else []
            cells.append(f"{seconds:.0f} ({base[place] / seconds:.1f}×)")
        lines.append(f"| {calls} | {tokens:,.0f} | {' | '.join(cells)} |")
    return lines


def advice(plan: Plan, costs: Costs, steps: int = 4) -> list[tuple[str, float]]:
    """Return by what factor episodes a second grow when a setting is turned, the best one first."""
    before = simulate(plan, costs, steps).seconds / plan.tasks
    found = []
    for name, turned in KNOBS.items():
        other = turned(plan)
        if other != plan and other.samplers < other.processes:
            found.append((name, before / (simulate(other, costs, steps).seconds / other.tasks)))
    return sorted(found, key=lambda each: -each[1])


def costs_of(model: str, work: Work, machine: Machine, gpus: int) -> tuple[Costs, int, int] | None:
    """Return the costs of a copy of a model with adapters, over how many GPUs it is spread, and the rows that fit into it.

    None if it fits none.
    """
    shape = SHAPES[model]
    found = parts(shape, "adapters", gpus, work, machine)
    if found is None:
        return None
    rate = machine.flops * machine.arithmetic * found.split
    through = machine.bandwidth * machine.traffic * found.split
    return (
        Costs(
            token=2 * shape.read / through + (2 * shape.layers * machine.latency if found.split > 1 else 0.0),
            row=max(2 * shape.read / rate, work.context * shape.kept / through),
            read=2 * shape.read / rate,
            trained=6 * shape.read / rate,
            step=0.05,
            episode=2e-4,
            received=2e-4,
            exchange=found.exchange,
            publish=found.publish,
            meeting=0.01,
        ),
        found.split,
        found.most_rows,
    )


def main(arguments: Sequence[str]) -> int:
    """Print where scaling stops."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="4B", choices=SHAPES)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--tail", type=float, default=0.8, help="spread of the lengths of answers (0.8)")
    parser.add_argument("--environment", type=float, default=0.5, help="mean seconds of a world's move (0.5)")
    parser.add_argument("--apart", action="store_true", help="samplers and learners on GPUs of their own")
    parser.add_argument("--tails", action="store_true", help="steps that run ahead, groups that are left")
    parser.add_argument(
        "--hard", type=float, default=0.8, help="with --tails: spread of all lengths of a task (0.8)"
    )
    parser.add_argument("--swarm", action="store_true", help="a planner that calls workers in parallel")
    asked = parser.parse_args(arguments)
    if asked.swarm:
        print("\n".join(swarm(asked.model)))
        return 0
    if asked.tails:
        print("\n".join(tails(asked.model, asked.agents, asked.tail, asked.hard)))
        return 0
    print("\n".join(table(asked.model, asked.agents, asked.tail, asked.environment, apart=asked.apart)))
    return 0


def table(model: str, agents: int, tail: float, environment: float, *, apart: bool = False) -> list[str]:
    """Return a row for each number of GPUs: a step, how well it scales, and the setting that helps most."""
    work = Work(agents=agents)
    lines = [
        "| GPUs | step (s) | episodes/s | of ideal | sampling | worlds | update | idle | turn first |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    best: float | None = None
    for gpus in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        found = costs_of(model, work, Machine(), gpus)
        if found is None:
            continue
        costs, split, rows = found
        processes = gpus // split
        plan = Plan(
            tasks=work.episodes // 8,
            agents=agents,
            turns=work.turns,
            question=work.question,
            longest=4 * work.new,
            mean=work.new,
            tail=tail,
            environment=environment,
            together=False,
            rows=rows,
            processes=processes,
            samplers=3 * processes // 4 if apart and processes > 1 else 0,
            staleness=1 if apart and processes > 1 else 0,
        )
        step = simulate(plan, costs)
        rate = work.episodes / step.seconds
        best = best or rate / gpus
        knob, gain = advice(plan, costs)[0]
        lines.append(
            f"| {gpus} | {step.seconds:,.0f} | {rate:.2g} | {rate / gpus / best:.0%} | {step.sampling:,.0f} | "
            f"{step.environment:,.1f} | {step.update:,.0f} | {step.idle:.0%} | {knob}: {gain:.2f}× |"
        )
    return lines


def run() -> dict[str, str]:
    """Return the tables of docs/scaling.md."""
    return {
        "4B, four agents": "\n".join(table("4B", 4, 0.8, 0.5)),
        "the same, samplers apart": "\n".join(table("4B", 4, 0.8, 0.5, apart=True)),
        "the same, worlds of 20 s": "\n".join(table("4B", 4, 0.8, 20.0)),
        "tasks that take long": "\n".join(tails("4B", 4, 0.8, 0.8)),
        "parallel calls": "\n".join(swarm("4B")),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
