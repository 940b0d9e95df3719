"""Blame: estimate the probability of success before and after every turn by continuing episodes.

An episode is continued from each of its moments (`rollout.interventions.continue_forks`): earlier turns are replayed in a new episode
state, and all later turns are sampled with the evaluated weights. The mean success of these continuations is the estimated
probability of success at this moment:

    Before turn t: Turn t and all later turns are resampled, and the other turns of the same moment are replayed.
    After turn t:  All turns of the moment of turn t are replayed. After the last moment, the outcome of the episode is used.
    The drop of turn t is the probability before the turn minus the probability after the turn.

The probability after one moment equals the probability before the next moment, so each moment is estimated only once. If agents never
act simultaneously, the drops of an episode sum to the probability at its beginning minus its outcome. Over all episodes, the mean
drop of every turn is 0, because a drop in failed episodes is balanced by a gain in solved episodes. Drops should therefore be used to
compare agents only on failed episodes; solved episodes are measured as well.

Continuations use the sampling settings of training, even if the episodes were sampled greedily. The n-th continuations of one moment
use the same seed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

from kapelle.environment import DrivenByPrograms, Environment, RewardsEpisodes, offers, report_of
from kapelle.errors import ConfigError, EpisodeError
from kapelle.rollout.episodes import roll_out_continuations
from kapelle.rollout.interventions import (
    Continuation,
    ContinuedFork,
    Fork,
    Record,
    continue_forks,
    turns_until,
)
from kapelle.rollout.partial import numbered
from kapelle.rollout.setup import RolloutSetup
from kapelle.runs.blamed import (
    Blame,
    BlamedEpisode,
    BlamedTurn,
    BlameFile,
    SampledInstead,
    said_in,
    uncertainty,
)
from kapelle.runtime.event_loop import run_async
from kapelle.types import Episode, Group, Turn

AT_ONCE = 512
"""Approximate number of continuations that are rolled out concurrently. The results of their episodes are saved together."""
ALTERNATIVES = 8
"""Maximum number of alternative completions that are stored for a turn."""
LONGEST = 4000
"""Maximum number of characters of a text that are stored."""
SAY_EVERY = 5.0
"""Time in seconds between two reports of the progress."""

Key = tuple[int, int | None]
"""Index of the first turn of a moment, and index of the only turn that is resampled, or None if all turns of the moment are resampled."""


def check_repeatable(environment: Environment) -> None:
    """Raise ConfigError if the episodes of an environment cannot be replayed.

    External programs are allowed, because many of them repeat exactly, and differences can be detected in their prompts.
    """
    alive = report_of(environment).alive
    if alive and not offers(environment, DrivenByPrograms):
        raise ConfigError(
            f"Blame replays episodes, but environment '{environment.name}' relies on answers that may differ the next time: "
            f"{', '.join(alive)}. Remove it, or read the episodes with `kapelle view`."
        )
    if offers(environment, RewardsEpisodes) and environment.compared:
        raise ConfigError(
            f"Blame replays single episodes, and {environment.compared[0]} compares the episodes of a group. Remove it, or read the episodes "
            "with `kapelle view`."
        )


def choose_episodes(groups: Sequence[Group], most: int) -> list[tuple[int, Episode]]:
    """Return the first `most` unsolved episodes and the same number of solved episodes, each with its index in its group.

    Episodes with an error or without a score are excluded. Raises ConfigError if all episodes are solved or if no episode has a
    score.
    """
    scored = [
        (k, episode)
        for group in groups
        for k, episode in enumerate(group.episodes)
        if episode.error is None and episode.success is not None and episode.turns
    ]
    if not scored:
        errors = Counter(each.error for group in groups for each in group.episodes if each.error is not None)
        why = (
            f": {errors.most_common(1)[0][0]}"
            if errors
            else ", because the environment scores none (`success`; with `rewarded`, set `environment.success=0.5` to define which are solved)"
        )
        raise ConfigError(
            f"None of the {sum(len(group.episodes) for group in groups)} episodes has a score{why}."
        )
    failed = [(k, each) for k, each in scored if (each.success or 0.0) < 1.0][:most]
    if not failed:
        raise ConfigError(
            f"All {len(scored)} episodes are solved. Use more episodes (`evaluation.problems`), an earlier checkpoint (RUN@STEP) or harder tasks."
        )
    return failed + [(k, each) for k, each in scored if (each.success or 0.0) >= 1.0][: len(failed)]


def moments_of(turns: Sequence[Turn]) -> list[range]:
    """Return the moments of an episode.

    A moment consists of successive turns of different agents with the same `Turn.completed_before`.
    """
    starts: list[int] = []
    speakers: set[str] = set()
    for k, turn in enumerate(turns):
        if k == 0 or turn.completed_before != turns[k - 1].completed_before or turn.agent in speakers:
            starts.append(k)
            speakers.clear()
        speakers.add(turn.agent)
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(turns)], strict=True)]


def forks_of(episode: Episode, sample: int, seed: int) -> dict[Key, Fork]:
    """Return the forks of an episode at each of its moments.

    For each moment, there is one fork in which all turns of the moment are resampled, and one fork for each turn in which only this
    turn is resampled. All later turns are always resampled, even if their prompts were created earlier. Therefore, the probability
    after one moment equals the probability before the next moment.
    """
    found: dict[Key, Fork] = {}
    for moment in moments_of(episode.turns):
        past, now = turns_until(episode, moment.start), episode.turns[moment.start : moment.stop]
        seeds = (seed, "blame", episode.task.id, episode.seed, moment.start)
        found[moment.start, None] = Fork(episode, sample, Record(past, ()), seeds)
        for turn in now if len(now) > 1 else ():
            kept = [each for each in now if each is not turn]
            found[moment.start, turn.index] = Fork(episode, sample, Record(past, kept), seeds)
    return found


def measure_blame(
    setup: RolloutSetup,
    chosen: Sequence[tuple[int, Episode]],
    measured: Mapping[str, Any],
    file: BlameFile | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Blame:
    """Estimate the probability of success before and after each turn of the chosen episodes.

    Each chosen episode is given with its index in its group. The argument `measured` contains the settings (`samples`, `seed`, …).
    Results in `file` are reused, and new results are appended to the file. The function `say` receives messages about the expected
    cost and the progress. Raises EpisodeError if no episode can be replayed exactly.
    """
    check_repeatable(setup.environment)
    samples, seed = int(measured["samples"]), int(measured["seed"])
    setup = replace(setup, sampling=None)
    keys = [(each.task.id, k, each.seed, said_in(each)) for k, each in chosen]
    kept = {} if file is None else file.read()
    known = {key: kept[key] for key in keys if key in kept}
    left = [place for place, key in enumerate(keys) if key not in known]

    if file is not None:
        file.append(())  # fails early if the folder cannot be written

    # The expected cost is estimated from the episodes themselves.
    forks = {place: forks_of(chosen[place][1], chosen[place][0], seed) for place in left}
    counts = {place: samples * len(own) for place, own in forks.items()}
    total = sum(counts.values())
    tokens = samples * sum(
        fork.record.sampled(fork.episode).total() for own in forks.values() for fork in own.values()
    )
    solved = sum((episode.success or 0.0) >= 1.0 for _, episode in chosen)
    say(f"{len(chosen) - solved} failed and {solved} solved episodes: {total:,} continuations, about {tokens:,} tokens"
        + (f"; {len(chosen) - len(left)} episodes have already been measured" if len(left) < len(chosen) else ""))  # fmt: skip

    began = reported = time.monotonic()
    done = sampled = 0
    excluded: Counter[str] = Counter()

    def ended(run: Continuation, episode: Episode) -> None:
        nonlocal done, sampled, reported
        done, sampled = done + 1, sampled + run.record.sampled(episode).total()
        now = time.monotonic()
        if now - reported >= SAY_EVERY or done == total:
            reported = now
            wait = (now - began) / done * (total - done)
            say(
                f"{done:,} of {total:,} continuations, {sampled:,} tokens, {_time(now - began)} so far, about {_time(wait)} left"
            )

    roll_out_all = partial(roll_out_continuations, setup, ended=ended)
    for places in _batches(counts):
        batch = [fork for place in places for fork in forks[place].values()]
        found = iter(run_async(partial(continue_forks, batch, samples, roll_out_all)))
        setup.engine.release_caches()
        added: list[BlamedEpisode] = []
        for place in places:
            became = {key: next(found) for key in forks[place]}
            how = next((each.diverged for each in became.values() if each.diverged is not None), None)
            if how is not None:
                excluded[how] += 1
                continue
            summed = _summed(keys[place], chosen[place][1], became)
            known[summed.key] = summed
            added.append(summed)
        if file is not None and added:
            file.append(added)
        if not known:
            raise EpisodeError(
                f"No episode of '{setup.environment.name}' repeats exactly with the same seed and turns: {excluded.most_common(1)[0][0]}. Derive all "
                "randomness of environment and workflow from their seeds."
            )
    return Blame(
        dict(measured),
        tuple(known[key] for key in keys if key in known),
        dict(excluded),
        None if file is None else file.path,
    )


def _batches(counts: Mapping[int, int]) -> Iterator[list[int]]:
    """Yield batches of episode indices, so that each batch has about `AT_ONCE` continuations."""
    batch: list[int] = []
    size = 0
    for place, count in counts.items():
        batch.append(place)
        size += count
        if size >= AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _summed(
    key: tuple[str, int, int, str], episode: Episode, became: Mapping[Key, ContinuedFork]
) -> BlamedEpisode:
    """Return the probabilities before and after the turns of an episode, computed from its continuations."""
    successes = {
        which: [each.success for each in found.valid if each.success is not None]
        for which, found in became.items()
    }
    moments = moments_of(episode.turns)
    place_of = {turn.index: which for which, turn in numbered(episode.turns)}
    turns = []
    for m, moment in enumerate(moments):
        # After the last moment the outcome is known.
        following = None if m + 1 == len(moments) else successes[moments[m + 1].start, None]
        after = episode.success if following is None else _mean(following)
        for turn in episode.turns[moment.start : moment.stop]:
            which = (moment.start, turn.index if len(moment) > 1 else None)
            error = uncertainty(successes[which]) ** 2 + (
                0.0 if following is None else uncertainty(following) ** 2
            )
            turns.append(
                BlamedTurn(
                    agent=turn.agent,
                    index=turn.index,
                    number=place_of[turn.index][1] + 1,
                    moment=m,
                    text=turn.text[:LONGEST],
                    before=_mean(successes[which]),
                    after=after,
                    error=error**0.5,
                    instead=_instead(became[which].episodes, place_of[turn.index]),
                )
            )
    assert episode.success is not None, "only scored episodes are chosen"
    task, sample, seed, completions = key
    return BlamedEpisode(
        task=task,
        sample=sample,
        seed=seed,
        tokens_hash=completions,
        question=episode.task.question[:LONGEST],
        agents=episode.agents,
        success=episode.success,
        values=(*(_mean(successes[moment.start, None]) for moment in moments), episode.success),
        turns=tuple(turns),
        continuations=sum(len(found.episodes) for found in became.values()),
        failed=sum(len(found.episodes) - len(found.valid) for found in became.values()),
        tokens=sum(found.tokens.total() for found in became.values()),
    )


def _instead(continuations: Sequence[Episode], which: tuple[str, int]) -> tuple[SampledInstead, ...]:
    """Return the completions of the agent's turn with this number in these continuations, most frequent first."""
    ended: dict[str, list[float | None]] = {}
    for each in continuations:
        turn = dict(numbered(each.turns)).get(which)
        if turn is not None:
            ended.setdefault(turn.text[:LONGEST], []).append(None if each.error is not None else each.success)
    ranked = sorted(ended.items(), key=lambda item: -len(item[1]))[:ALTERNATIVES]
    return tuple(
        SampledInstead(text, len(found), _mean([each for each in found if each is not None]))
        for text, found in ranked
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
