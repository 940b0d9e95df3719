"""A step of training as events: who decodes, waits, exchanges, updates and publishes when, and who has nothing to do.

    python -m benchmarks.scale_simulator                       # a 4B team on 1 to 512 GPUs, and which setting to turn
    python -m benchmarks.scale_simulator --model 8B --agents 8 --apart
    python -m benchmarks.scale_simulator --tails               # what `training.asynchronous` gains where some tasks take long
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
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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


# -------- Tasks that take long: what is gained by sampling without interruption (`training.asynchronous`)

SPLITS = (1 / 2, 3 / 4, 7 / 8)
"""Shares of the processes that sample, of which the best one is taken, where others learn meanwhile."""
STEADY = 8
"""First step that counts. Before it, there are too few old groups."""


@dataclass(slots=True)
class _Task:
    """A group that is being sampled."""

    number: int
    started: int
    """Step that started it."""
    episodes: list[list[int]]
    """Tokens of each answer of each episode."""
    left: int
    """Number of unfinished episodes."""
    versions: int = 0
    """Sum over the tokens of the number of weights that had been loaded."""


class _Sampler:
    """A process that samples without interruption. An event is the end of an answer."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.now, self.steps, self.groups, self.joined = 0.0, 0, 0, 0
        self.loads: list[int] = []
        """Decode steps at which new weights were loaded."""
        self.rows: list[tuple[int, int, int, int, list[int], _Task]] = []
        """Decode step at which an answer ends, order of joining, first decode step, turn, answers of the episode, group."""
        self.waiting: deque[tuple[list[int], _Task]] = deque()

    @property
    def each(self) -> float:
        """Seconds of a decode step."""
        return self.costs.token + self.costs.row * len(self.rows)

    @property
    def next_end(self) -> float:
        """Time at which the next answer ends."""
        return self.now + (self.rows[0][0] - self.steps) * self.each if self.rows else math.inf

    def start(self, group: _Task) -> None:
        self.groups += 1
        self.waiting.extend((answers, group) for answers in group.episodes)
        self._fill()

    def load(self, now: float) -> None:
        """Decode until `now`, and load new weights, with which all live rows are read again."""
        if self.rows and now > self.now:
            count = min(self.rows[0][0] - self.steps, math.ceil((now - self.now) / self.each))
            self.steps, self.now = self.steps + count, self.now + count * self.each
        self.now = max(self.now, now)
        self.loads.append(self.steps)
        for _, _, since, turn, answers, _ in self.rows:
            self.now += self.costs.read * (self.plan.question + sum(answers[:turn]) + self.steps - since)

    def end(self) -> _Task | None:
        """Decode until the next answer ends, and return its group if that is then finished."""
        self.now = self.next_end
        self.steps, _, since, turn, answers, group = heapq.heappop(self.rows)
        before = bisect.bisect_right(self.loads, since)
        group.versions += before * (self.steps - since) + sum(
            self.steps - load for load in self.loads[before:]
        )
        if turn + 1 < len(answers):
            self._join(turn + 1, answers, group)
            return None
        self._fill()
        group.left -= 1
        self.groups -= group.left == 0
        return None if group.left else group

    def _fill(self) -> None:
        while self.waiting and len(self.rows) < self.plan.rows:
            self._join(0, *self.waiting.popleft())

    def _join(self, turn: int, answers: list[int], group: _Task) -> None:
        new_messages = answers[turn - 1] if self.plan.new_messages and turn else 0
        self.now += self.costs.read * ((self.plan.question if turn < self.plan.agents else 0) + new_messages)
        self.joined += 1
        row = (self.steps + answers[turn], self.joined, self.steps, turn, answers, group)
        heapq.heappush(self.rows, row)


def with_tails(
    plan: Plan, costs: Costs, hard: float, most: int = 0, steps: int = 24, seed: int = 0
) -> tuple[float, float]:
    """Return the episodes per second that are learned from, and the mean age of their tokens in steps.

    All lengths of a task have a lognormal factor, of standard deviation `hard` of the logarithm. `most` is `training.max_staleness` of
    an asynchronous run; with 0, every step waits for all of its groups, as the synchronous loop does.
    """
    from kapelle.features.ahead.asynchronous import steps_ahead

    samplers = [_Sampler(plan, costs) for _ in range(plan.samplers or plan.processes)]
    learning, ahead = plan.processes - plan.samplers, steps_ahead(most)
    events: list[tuple[float, int]] = []
    """When the next answer of each process ends."""
    finished: list[tuple[int, _Task]] = []
    """Groups that no step has taken, by their number; the oldest one is first."""
    live: Counter[int] = Counter()
    """Number of unfinished groups, by the step that started them."""
    ages: list[float] = []
    now, steady, begun = 0.0, 0.0, 0

    def end_one() -> float:
        """Decode until the next answer of all processes ends, and return the time."""
        at, place = events[0]
        group = samplers[place].end()
        heapq.heapreplace(events, (samplers[place].next_end, place))
        if group is not None:
            live[group.started] -= 1
            heapq.heappush(finished, (group.number, group))
        return at

    for step in range(steps):
        steady = now if step == STEADY else steady
        while events and events[0][0] <= now:
            end_one()
        for sampler in samplers:
            sampler.load(now)
        for number in range(begun, (step + ahead + 1) * plan.tasks):
            least = min(samplers, key=lambda sampler: sampler.groups)
            least.start(_task(plan, hard, seed, number, step))
            live[step] += 1
        begun = (step + ahead + 1) * plan.tasks
        events[:] = [(sampler.next_end, place) for place, sampler in enumerate(samplers)]
        heapq.heapify(events)
        while len(finished) < plan.tasks or live[step - most]:
            now = max(now, end_one())
        taken = [heapq.heappop(finished)[1] for _ in range(plan.tasks)]
        answers = [each for group in taken for each in group.episodes]
        tokens = sum(map(sum, answers))
        if step >= STEADY:
            ages.append(step + 1 - sum(group.versions for group in taken) / tokens)
        tokens += len(answers) * plan.agents * plan.question
        tokens += plan.new_messages * sum(sum(each[:-1]) for each in answers)
        now += (
            len(answers) * (costs.episode + costs.received) + costs.step + costs.trained * tokens / learning
        )
        now += costs.exchange + 2 * costs.meeting + costs.publish
    return (steps - STEADY) * plan.tasks * plan.samples / (now - steady), statistics.fmean(ages)


def _task(plan: Plan, hard: float, seed: int, number: int, started: int) -> _Task:
    """Return a group, whose lengths depend on the seed and its number alone."""
    draw = random.Random(f"{seed}/{number}")
    harder = replace(plan, mean=plan.mean * math.exp(hard * draw.gauss(0.0, 1.0) - hard**2 / 2))
    turns = range(plan.agents * plan.turns)
    episodes = [[lengths(harder, draw) for _ in turns] for _ in range(plan.samples)]
    return _Task(number, started, episodes, plan.samples)


def tails(model: str, agents: int, tail: float, hard: float) -> list[str]:
    """Return a row for each number of GPUs: the synchronous loop, and by what factor asynchronous sampling raises its rate."""
    work, stale = Work(agents=agents), (1, 2, 4)
    lines = [
        f"| GPUs | tasks | step (s) | episodes/s | {' | '.join(f'`max_staleness: {most}`' for most in stale)} |",
        "| ---: | ---: | ---: | ---: |" + " ---: |" * len(stale),
    ]
    for gpus in (8, 32, 128, 512):
        found = costs_of(model, work, Machine(), gpus)
        if found is None:
            continue
        costs, split, rows = found
        processes = gpus // split
        plan = Plan(
            tasks=max(work.episodes // 8, processes),
            agents=agents,
            turns=work.turns,
            question=work.question,
            longest=16 * work.new,
            mean=work.new,
            tail=tail,
            rows=rows,
            processes=processes,
        )
        apart = [replace(plan, samplers=max(1, round(part * processes))) for part in SPLITS]
        apart = [each for each in apart if each.samplers < processes]
        plain, _ = with_tails(plan, costs, hard)
        cells = []
        for most in stale:
            rate, age = max(with_tails(each, costs, hard, most) for each in apart)
            cells.append(f"{rate / plain:.2f}× ({age:.1f})")
        step = plan.tasks * plan.samples / plain
        lines.append(f"| {gpus} | {plan.tasks} | {step:,.0f} | {plain:.3g} | {' | '.join(cells)} |")
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
    parser.add_argument(
        "--tails", action="store_true", help="asynchronous sampling of tasks of very different length"
    )
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
