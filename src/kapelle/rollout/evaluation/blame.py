"""Blame: the probability of success before and after every turn, estimated by continuations.

An episode is continued from each of its moments (`rollout.interventions.continue_forks`): earlier turns are replayed in a new environment,
and everything after them is sampled with the measured weights. The mean success of these continuations is the probability of success
at that moment,

    before turn t: this turn and all later ones are resampled; other turns of the moment are replayed
    after turn t:  all turns of this turn's moment are replayed; after the last moment it is the episode's own outcome
    drop of turn t = before − after

The probability after one moment equals the probability before the next, so each moment is estimated once. If no two agents act at once,
the drops of an episode sum to the probability at its beginning minus its outcome. Over all episodes the mean drop of every turn is 0,
because a drop in failed episodes is balanced by a gain in solved ones. So drops compare agents only on failed episodes; solved episodes
are measured too.

Continuations use the sampling of training, even for greedy episodes. The n-th continuations of one moment share their seed.
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
"""Approximate number of continuations that are rolled out at once; the results of their episodes are saved together."""
ALTERNATIVES = 8
"""Maximum number of alternative completions that are kept for a turn."""
LONGEST = 4000
"""Maximum number of characters that are kept of a text."""
SAY_EVERY = 5.0
"""Seconds between two reports of the progress."""

Key = tuple[int, int | None]
"""Index of the first turn of a moment, and of the only turn that is resampled; None for the whole moment."""


def check_repeatable(environment: Environment) -> None:
    """Raise ConfigError if the episodes of an environment cannot be replayed.

    External programs are allowed, because many repeat exactly, and differences show in their prompts.
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
    """Return the first `most` unsolved episodes and as many solved ones, each with its place in its group.

    Episodes with an error or without a score are excluded. Raises ConfigError if all are solved or none is scored.
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
    """Return the moments of an episode: successive turns of different agents with the same `Turn.completed_before`."""
    starts: list[int] = []
    speakers: set[str] = set()
    for k, turn in enumerate(turns):
        if k == 0 or turn.completed_before != turns[k - 1].completed_before or turn.agent in speakers:
            starts.append(k)
            speakers.clear()
        speakers.add(turn.agent)
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(turns)], strict=True)]


def forks_of(episode: Episode, sample: int, seed: int) -> dict[Key, Fork]:
    """Return the forks of an episode: for each moment, one that resamples all of it, and one for each turn that resamples only that turn.

    All later turns are resampled, even if their prompts were fixed earlier. So the probability after one moment equals the probability
    before the next one.
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
    """Return the probability of success around each turn of these episodes; each is given with its place in its group.

    `measured` has the settings (`samples`, `seed`, …). Results in `file` are reused, and new results are appended to it. `say` receives
    the expected cost and the progress. Raises EpisodeError if no episode can be replayed exactly.
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
    """Yield places of episodes with about `AT_ONCE` continuations together."""
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
    """Return the probabilities around an episode's turns from its continuations."""
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
    """Return the completions of the agent's turn of this number in these continuations, most frequent first."""
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
