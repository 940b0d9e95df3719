"""What fits into a device's memory, and what to change where a run does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kapelle.planning.memory import processes
from kapelle.planning.situation import Situation
from kapelle.team import Place

MOST = 1 << 24
"""Values beyond which nothing is looked for: they fit without limit."""
SMALL = 256
"""Least tokens of a microbatch that is worth its passes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest values that fit, each with everything else as it is; 0 where even the least does not."""

    microbatch_tokens: int
    """Of `training.microbatch_tokens`; not more than a step has."""
    rows: int
    """Answers that are sampled at once: tasks × episodes × agents."""
    tasks_per_step: int
    """Of `training.tasks_per_step`."""
    longest_text: int
    """Tokens of prompt and answer together, of the longest turn."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of a setting, and the memory of the fullest device after it and those before it."""

    setting: str
    costs: str
    peak: int


def peak(now: Situation) -> int:
    """Return the bytes of the fullest device."""
    devices: dict[str, int] = {}
    for process in processes(now):
        devices[process.device] = devices.get(process.device, 0) + process.peak
    return max(devices.values())


def limits(now: Situation, memory: int) -> Limits:
    """Return the largest values with which every device holds its processes in so many bytes."""
    work = now.work
    step = work.tasks * work.group * sum(said.prompt + said.answer for said in work.said)
    context = min((shape.context for shape in now.shapes.values()), default=MOST)
    tasks = _largest(MOST, lambda count: peak(with_tasks(now, count)) <= memory)
    moments: dict[int, int] = {}
    for said in work.said:
        moments[said.moment] = moments.get(said.moment, 0) + 1
    together = max(moments.values(), default=1) * work.group
    return Limits(
        _largest(step, lambda count: peak(replace(now, microbatch_tokens=count)) <= memory),
        min(tasks * together, now.max_rows) if now.engine == "local" else tasks * together,
        tasks,
        _largest(context, lambda count: peak(replace(now, work=work.with_longest(count))) <= memory),
    )


def with_tasks(now: Situation, count: int) -> Situation:
    """Return a situation with so many tasks in a step."""
    return replace(now, work=replace(now.work, tasks=count))


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` that fits, where every smaller one does; 0 for none."""
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


def advice(now: Situation, memory: int) -> tuple[Advice, ...]:
    """Return the changes, one on top of the other, after which a run fits; empty if it fits as it is.

    If not even all of them are enough, they end with what they reach.
    """
    found: list[Advice] = []
    for setting, costs, changed in _changes(now, memory):
        if peak(now) <= memory:
            break
        after = changed(now)
        if peak(after) < peak(now):
            now = after
            found.append(Advice(setting if "{" not in setting else _filled(setting, now), costs, peak(now)))
    return tuple(found)


_Change = tuple[str, str, Callable[[Situation], Situation]]


def _changes(now: Situation, memory: int) -> Iterator[_Change]:
    """Yield what can be changed, the cheapest first."""
    if not now.checkpointing:
        costs = "an update takes about half as long again; the same gradients"
        yield (
            "training.gradient_checkpointing=true",
            costs,
            lambda found: replace(found, checkpointing=True),
        )
    costs = "more passes; the same gradients"
    yield "training.microbatch_tokens={microbatch}", costs, lambda found: _smaller_passes(found, memory)
    if now.engine == "local" and now.plays:
        yield (
            "engine.max_rows={rows}",
            "slower sampling; the same answers",
            lambda found: _fewer_rows(found, memory),
        )
        yield (
            "engine.kept_tokens=0",
            "later turns read their prompts again",
            lambda x: replace(x, kept_tokens=0),
        )
    if any(place.dtype == "float32" for place in now.places.values()):
        yield "model.dtype=bfloat16", "rounding; weights that train stay in float32", _in_half
    frozen = [base for base, path in now.team.bases.items() if path != "embedded"]
    if any(base not in now.team.trained_bases and base not in now.nf4 for base in frozen):
        yield "model.quantization=nf4", "other weights, slower; needs CUDA and kapelle[quantised]", _in_codes
    if now.team.trained_bases and now.optimizer == "adamw":
        changed = "rounded moments; needs CUDA and kapelle[quantised]"
        yield "optimizer.name=adamw_8bit", changed, lambda found: replace(found, optimizer="adamw_8bit")


def _filled(setting: str, now: Situation) -> str:
    return setting.format(microbatch=now.microbatch_tokens, rows=now.max_rows)


def _smaller_passes(now: Situation, memory: int) -> Situation:
    fits = _largest(
        now.microbatch_tokens, lambda count: peak(replace(now, microbatch_tokens=count)) <= memory
    )
    return replace(now, microbatch_tokens=max(fits, min(SMALL, now.microbatch_tokens)))


def _fewer_rows(now: Situation, memory: int) -> Situation:
    fits = _largest(now.max_rows, lambda count: peak(replace(now, max_rows=count)) <= memory)
    return replace(now, max_rows=max(fits, 1))


def _in_half(now: Situation) -> Situation:
    places = {
        base: Place("bfloat16", place.device) if place.dtype == "float32" else place
        for base, place in now.places.items()
    }
    return replace(now, places=places)


def _in_codes(now: Situation) -> Situation:
    codes = frozenset(
        base
        for base, path in now.team.bases.items()
        if path != "embedded" and base not in now.team.trained_bases
    )
    shapes = {
        base: replace(shape, flat=shape.flat and base not in codes) for base, shape in now.shapes.items()
    }
    return replace(now, nf4=codes, shapes=shapes)
