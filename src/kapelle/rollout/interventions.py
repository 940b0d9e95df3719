"""Interventions: an episode that was played is played on from one of its moments, with something changed there.

What can be changed of an episode (`algorithm.Change`):

- `resample`: one turn is sampled anew;
- `replace`: another turn stands in its place, such as that of another episode that read the same prompt;
- `remove`: agents say nothing, from their first turn on;
- `swap`: another policy speaks for an agent, from its first turn on.

All before that moment is replayed token for token (`branching.Record`), and so is what others say at the same moment; all
after it is live. The n-th continuations of all changes at one moment use the same seeds, so that luck explains less of
their difference.

**What it may cost.** With a bound on tokens each episode has an equal part of it. Which changes are played is decided by the *other* episodes of its group alone:
what each slot (an agent's turn of a number) costs them, how often they have it, and how much it says; the slots that say most are taken as long as they are expected to fit. Had
the episode's own turns a say in whether they are judged by a continuation, the choice between two baselines would depend on what they are compared with, and the update would no
longer follow ∇J. A slot that fits in part is played in that share of the episodes, drawn by their seeds. What the continuations really sampled is counted in `Episode.continued`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from kapelle.algorithm import Change, Interventions, Slot
from kapelle.errors import EpisodeError
from kapelle.rollout.branching import Record
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Team
from kapelle.types import Episode, Group, Intervention, Turn


class Continuation(NamedTuple):
    """One continuation of an episode."""

    episode: Episode
    sample: int
    """The episode's number in its group."""
    record: Record
    seed: int
    """Of what is sampled anew."""


PlayAll = Callable[[Sequence[Continuation]], Awaitable[Sequence[Episode]]]
"""Plays continuations, all at once; a failed one is returned, not raised."""


async def intervene(
    groups: Sequence[Group], asked: Interventions, team: Team, step: int, environment: str, play_all: PlayAll
) -> list[Group]:
    """Return groups with what became of their episodes where something was changed (`Episode.interventions`).

    `step` is the number of groups of the whole step. A continuation that fails is left out of its change's returns. An episode
    that does not repeat becomes an error that says so.
    """
    chosen: list[tuple[int, int, Change]] = []
    runs: list[Continuation] = []
    for g, group in enumerate(groups):
        for e, episode in enumerate(group.episodes):
            for change in affordable(group, e, asked, team, step) if episode.error is None else ():
                chosen.append((g, e, change))
                past, _ = moment_of(episode, change)
                runs += [
                    Continuation(
                        episode,
                        e,
                        record_of(episode, change),
                        derive_seed(episode.seed, "intervention", len(past), n),
                    )
                    for n in range(asked.continuations)
                ]
    played = await play_all(runs)
    found: dict[tuple[int, int], list[Intervention]] = {}
    spent: dict[tuple[int, int], Counter[str]] = {}
    faults: dict[tuple[int, int], str] = {}
    for number, (g, e, change) in enumerate(chosen):
        own = slice(number * asked.continuations, (number + 1) * asked.continuations)
        returns = []
        for run, ended in zip(runs[own], played[own], strict=True):
            try:
                run.record.check_repeated(ended, environment, "another algorithm")
            except EpisodeError as error:
                faults.setdefault((g, e), f"EpisodeError: {error}")
            spent.setdefault((g, e), Counter()).update(run.record.sampled(ended))
            if ended.error is None:
                returns.append(asked.returns(ended))
        first = _first_turn(groups[g].episodes[e], change)
        found.setdefault((g, e), []).append(Intervention(change.what, change.agents, first, tuple(returns)))
    return [
        replace(
            group,
            episodes=tuple(
                _with(episode, found.get((g, e), []), spent.get((g, e), Counter()), faults.get((g, e)))
                for e, episode in enumerate(group.episodes)
            ),
        )
        for g, group in enumerate(groups)
    ]


def _with(episode: Episode, found: Sequence[Intervention], spent: Counter[str], fault: str | None) -> Episode:
    if fault is not None:
        return Episode(
            episode.task, episode.seed, episode.agents, episode.turns, error=fault, continued=spent
        )
    if not found:
        return episode
    continued = Counter(episode.continued) + spent
    return replace(episode, interventions=tuple(found), continued=dict(continued))


def affordable(group: Group, number: int, asked: Interventions, team: Team, step: int) -> list[Change]:
    """Return the changes of an episode that are played: all of them, or those in slots that are expected to fit what it may spend."""
    changes = list(asked.change(group, number, team))
    if asked.share is None and asked.tokens is None:
        return changes
    others = Group(group.task, tuple(each for k, each in enumerate(group.episodes) if k != number))
    costs: dict[Slot, list[int]] = {}
    for k, other in enumerate(others.episodes):
        for change in asked.change(others, k, team) if other.error is None else ():
            first = _first_turn(other, change)
            after = 0 if first is None else asked.continuations * _tokens(other.turns[first:])
            costs.setdefault(slot_of(other, change), []).append(after)
    if not costs:
        return []
    room = float("inf")
    if asked.share is not None:
        room = asked.share * fmean(_tokens(other.turns) for other in others.valid)
    if asked.tokens is not None:
        room = min(room, asked.tokens / (step * len(group.episodes)))
    slots = list(costs)
    if asked.says is not None:
        says = asked.says(others)
        slots.sort(key=lambda slot: -says(slot))
    fitting: set[Slot] = set()
    for slot in slots:
        cost = sum(costs[slot]) / len(others.valid)
        share = 1.0 if cost <= room else room / cost
        if share == 1.0 or _drawn(group.episodes[number], slot) < share:
            fitting.add(slot)
        room = max(0.0, room - cost)
    return [change for change in changes if slot_of(group.episodes[number], change) in fitting]


def _drawn(episode: Episode, slot: Slot) -> float:
    """Return a number in [0, 1) that depends on nothing but the episode's seed and a slot."""
    number = -1 if slot.number is None else slot.number
    return random.Random(derive_seed(episode.seed, "budget", *slot.agents, number)).random()


def slot_of(episode: Episode, change: Change) -> Slot:
    """Return what a change has in common with the same change to another episode."""
    if change.turn is None:
        return Slot(change.agents, None)
    (agent,) = change.agents
    return Slot(change.agents, sum(turn.agent == agent for turn in episode.turns[: change.turn]))


def _tokens(turns: Sequence[Turn]) -> int:
    return sum(len(turn.completion_ids) for turn in turns)


def _first_turn(episode: Episode, change: Change) -> int | None:
    if change.turn is not None:
        return change.turn
    return next((turn.index for turn in episode.turns if turn.agent in change.agents), None)


def moment_of(episode: Episode, change: Change) -> tuple[Sequence[Turn], Sequence[Turn]]:
    """Return the turns that were over when the first changed one began, and the others that were under way then."""
    first = _first_turn(episode, change)
    if first is None:
        return episode.turns, ()
    seen = episode.turns[first].seen
    beside = [turn for turn in episode.turns[seen:] if turn.seen <= seen and turn.agent not in change.agents]
    return episode.turns[:seen], beside


def record_of(episode: Episode, change: Change) -> Record:
    """Return what a continuation replays, and who is changed in it."""
    past, beside = moment_of(episode, change)
    match change.what, change.by:
        case "replace", Turn() as other:
            return Record(past, (*beside, other))
        case "remove", None:
            return Record(past, beside, absent=change.agents)
        case "swap", str() as policy:
            return Record(past, beside, swapped=dict.fromkeys(change.agents, policy))
        case "resample", None:
            return Record(past, beside, anew=change.agents)
    raise ValueError(f"a change `{change.what}` has no `by` like {change.by!r:.60}")
