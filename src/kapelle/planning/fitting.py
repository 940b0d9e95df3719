"""What fits into a device's memory, and what to change where a run does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kapelle.planning.memory import processes
from kapelle.planning.situation import Situation
from kapelle.team import Place

MOST = 1 << 24
"""Values beyond which nothing is looked for: they fit without limit."""
SAMPLES = ("sampling", "evaluation")
SMALL = 256
"""Least tokens of a microbatch that is worth its passes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest values with which the phases that depend on them fit, each with everything else as it is.

    0 where even the least does not fit.
    """

    microbatch_tokens: int
    """Of `training.microbatch_tokens`; not more than a step has."""
    rows: int
    """Answers sampled at once, of each base: `engine.max_rows`."""
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


def peak(now: Situation, phases: tuple[str, ...] = ()) -> int:
    """Return the bytes of the fullest device, in these phases alone if any are named."""
    devices: dict[str, int] = {}
    for process in processes(now):
        own = [phase.total for phase in process.phases if phase.name in phases]
        devices[process.device] = devices.get(process.device, 0) + max(own, default=process.peak)
    return max(devices.values())


def limits(now: Situation, memory: int) -> Limits:
    """Return the largest values with which every device holds its processes in so many bytes."""
    work = now.work
    step = work.tasks * work.group * sum(said.prompt + said.answer for said in work.said)
    context = min((shape.context for shape in now.shapes.values()), default=MOST)
    rows = min(MOST, now.max_rows)

    def fits(found: Situation, *phases: str) -> bool:
        return peak(found, phases) <= memory

    return Limits(
        _largest(step, lambda count: fits(replace(now, microbatch_tokens=count), "update")),
        _largest(rows, lambda count: fits(replace(now, max_rows=count), *SAMPLES)),
        _largest(MOST, lambda count: fits(with_tasks(now, count), "sampling", "update")),
        _largest(context, lambda count: fits(replace(now, work=work.with_longest(count)))),
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


def advice(now: Situation, memory: int) -> tuple[tuple[Advice, ...], Situation]:
    """Return the changes, one on top of the other, after which a run fits, and the run as it then is; none if it fits.

    If not even all of them are enough, they end with what they reach.
    """
    found: list[Advice] = []
    while peak(now) > memory:
        tried = ((setting, costs, changed(now)) for setting, costs, changed in _changes(now, memory))
        better = next((each for each in tried if peak(each[2]) < peak(now)), None)
        if better is None:
            break
        setting, costs, now = better
        found = [each for each in found if each.setting.partition("=")[0] != setting.partition("=")[0]]
        found.append(Advice(_filled(setting, now), costs, peak(now)))
    return tuple(found), now


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
    """Return it with the largest passes that fit, or with the least that help."""
    least = replace(now, microbatch_tokens=min(SMALL, now.microbatch_tokens))
    enough = max(memory, peak(least))
    fits = _largest(
        now.microbatch_tokens, lambda count: peak(replace(now, microbatch_tokens=count)) <= enough
    )
    return replace(now, microbatch_tokens=max(fits, least.microbatch_tokens))


def _fewer_rows(now: Situation, memory: int) -> Situation:
    """Return it with the most rows that fit, or with the fewest that are needed for other phases to be the worst."""
    enough = max(memory, peak(replace(now, max_rows=1)))
    fits = _largest(now.max_rows, lambda count: peak(replace(now, max_rows=count)) <= enough)
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
