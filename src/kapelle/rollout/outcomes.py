"""Convert the results of environments to plain Python values.

Environments are user code: they may return NumPy numbers, put any object into `info`, and raise any BaseException. Converted values
are recorded exactly and are read back unchanged. All other values raise an EpisodeError, so that only one episode fails and not the
run.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pydantic

from kapelle.environment import Outcome
from kapelle.errors import EngineError, EpisodeError, KapelleError, TrainingHalted
from kapelle.runtime.deadlines import DeadlineExceeded
from kapelle.runtime.foreign_code import EnvironmentErrorElsewhere, place_of, words_of
from kapelle.types import Episode, Group, Json, Turn

DEEPEST = 64
"""Maximum depth of nested lists and mappings in `info`. At about a thousand levels, JSON can no longer be written or read."""
WIDEST = 8192
"""Maximum number of bits of an integer in `info`. Python converts integers of at most 4,300 digits to strings."""
MOST_REWARDED = 1e15
"""Maximum absolute value of a reward, so that sums of squared returns over a step do not exceed the range of float32."""
LONGEST = 4000
"""Maximum number of characters of an episode's `error`."""


def number(value: object, what: str) -> float:
    """Return a number, or a scalar of NumPy or torch, as a float. Raises EpisodeError for other values."""
    if type(value) is float:  # nearly always
        return value
    value = _scalar(value)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise EpisodeError(f"{what} is {_shown(value)}, a {type(value).__name__} instead of a number.")
    return float(value)


def share(value: object, what: str) -> float:
    """Return a number in [0, 1] as a float. Raises EpisodeError for other values."""
    known = number(value, what)
    if not 0.0 <= known <= 1.0:
        raise EpisodeError(f"{what} is {known}, outside [0, 1].")
    return known


def text(value: object, what: str) -> str:
    """Return a string as an instance of `str` itself. Raises EpisodeError for other values."""
    if not isinstance(value, str):
        raise EpisodeError(f"{what} is {_shown(value)}, a {type(value).__name__} instead of a string.")
    return str.__str__(value)


def checked_rewards(rewards: object, names: Collection[str]) -> dict[str, float]:
    """Return the rewards of agents as floats.

    Raises EpisodeError if an agent is not in the team or if a value is not a number. Infinite values and NaN are accepted by this
    function, because the range is checked later on the sum over the episode.
    """
    if type(rewards) is not dict and not isinstance(rewards, Mapping):
        raise EpisodeError(
            f"The environment returned {_shown(rewards)} as rewards. Return a mapping from agents to rewards."
        )
    for agent in rewards:
        if not isinstance(agent, str) or agent not in names:
            raise EpisodeError(f"The environment rewards {_shown(agent)}, which is not in the team.")
    return {
        str.__str__(agent): number(reward, f"The reward of '{agent}'") for agent, reward in rewards.items()
    }


_PLAIN = frozenset({str, float, bool, type(None)})
"""Types of values that need no conversion."""


def plain(value: object, place: str, depth: int = 0) -> Json:
    """Return a copy of a value that consists of plain types, which JSON represents exactly.

    Scalars of NumPy and torch are converted to Python scalars. Raises EpisodeError for values that cannot be converted; `place` is
    the name of the value in the error message.
    """
    if type(value) in _PLAIN:  # nearly always
        return value
    if type(value) is not dict:
        value = _scalar(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            if value.bit_length() > WIDEST:
                raise EpisodeError(
                    f"{place} is an integer of {value.bit_length()} bits, more than the limit of {WIDEST}."
                )
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
    if depth >= DEEPEST:
        raise EpisodeError(f"{place[:200]} is nested more than {DEEPEST} levels deep, or contains itself.")
    if type(value) is dict or isinstance(value, Mapping):
        found: dict[Any, Json] = {}
        for key, inner in value.items():
            if type(key) is str:  # nearly always
                found[key] = inner if type(inner) in _PLAIN else plain(inner, f"{place}.{key}", depth + 1)
                continue
            known: Any = plain(key, f"a key in {place}", depth + 1)
            try:
                hash(known)
            except TypeError as error:
                raise EpisodeError(
                    f"A key in {place} contains a list or mapping. Use strings or numbers as keys."
                ) from error
            found[known] = plain(inner, f"{place}.{key}", depth + 1)
        return found
    if isinstance(value, list | tuple):
        items = [plain(inner, f"{place}.{index}", depth + 1) for index, inner in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    raise EpisodeError(
        f"{place} is a {type(value).__name__}, which JSON cannot represent. Use strings, numbers, lists and mappings."
    )


def in_range(total: float, bounds: tuple[float, float]) -> bool:
    """Return whether a total is within two bounds, up to the rounding errors of sums."""
    low, high = bounds
    if -math.inf < low <= total <= high < math.inf:  # nearly always
        return True
    slack = 1e-9 * max(1.0, abs(low), abs(high))
    return math.isfinite(total) and low - slack <= total <= high + slack


def accepted(
    outcome: Outcome, turns: Sequence[Turn], bounds: tuple[float, float], names: Sequence[str]
) -> Outcome:
    """Return the outcome in plain values.

    Raises EpisodeError if a value cannot be converted or if a return is out of range.
    """
    rewards = checked_rewards(outcome.rewards, names)
    for name in names:
        amounts = [turn.reward for turn in turns if turn.agent == name] + [rewards.get(name, 0.0)]
        total = sum(amounts)
        if not in_range(total, bounds):
            raise EpisodeError(
                f"Agent '{name}' has the return {total}, outside the declared range [{bounds[0]}, {bounds[1]}]."
            )
        if max(map(abs, amounts)) > MOST_REWARDED:
            far = next(reward for reward in amounts if abs(reward) > MOST_REWARDED)
            raise EpisodeError(
                f"Agent '{name}' has the reward {far:g}, beyond ±{MOST_REWARDED:g}, the limit of sums in float32. Use smaller rewards."
            )
    return plain_outcome(outcome, rewards)


def plain_outcome(outcome: Outcome, rewards: Mapping[str, float]) -> Outcome:
    """Return the outcome in plain values, with these rewards. Raises EpisodeError if a value cannot be converted."""
    info = plain(outcome.info, "info")
    if not isinstance(info, dict):
        raise EpisodeError(f"`info` is {_shown(info)}. Return a mapping.")
    truncated: object = outcome.truncated
    if truncated is not False and not isinstance(truncated := _scalar(truncated), bool):
        raise EpisodeError(f"`truncated` is {_shown(truncated)}, neither true nor false.")
    return Outcome(
        rewards,
        None if outcome.success is None else share(outcome.success, "`success`"),
        info,
        truncated,
        {text(agent, "An agent in `roles`"): text(role, "A role") for agent, role in outcome.roles.items()},
    )


def pending_cancellations() -> int:
    """Return the number of pending cancellation requests of the current asyncio task."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


def fault(error: BaseException, before: int) -> str:
    """Return the reason why an episode failed, or raise the error again if the episode did not cause it.

    The errors that are raised again are KeyboardInterrupt, EngineError, TrainingHalted, and a cancellation by the caller, even if the
    environment replaced the cancellation with another error. The argument `before` is the result of `pending_cancellations` at the
    start of the episode.
    """
    if isinstance(error, KeyboardInterrupt | EngineError | TrainingHalted):
        raise error
    if pending_cancellations() > before:
        if isinstance(error, asyncio.CancelledError):
            raise error
        raise asyncio.CancelledError from error
    message = f"{type(error).__name__}: {message_of(error)}"
    # Drop the frames of the error and its causes, which would keep the episode in memory until garbage collection.
    causes: list[BaseException | None] = [error]
    seen: set[int] = set()
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        BaseException.with_traceback(cause, None)
        causes += [cause.__cause__, cause.__context__]
        if isinstance(cause, BaseExceptionGroup):
            causes += cause.exceptions
    return message


def message_of(error: BaseException) -> str:
    """Return the message of an error, and the line of the environment's code that raised it."""
    try:
        message = str(error)
    except Exception as unreadable:  # noqa: BLE001 - the environment's own class
        message = f"(its message cannot be read: {type(unreadable).__name__})"
    located = (
        KapelleError | DeadlineExceeded | EnvironmentErrorElsewhere
    )  # their messages do not need the line
    where = "" if isinstance(error, located) else place_of(error)
    if isinstance(error, pydantic.ValidationError) or message.startswith("'coroutine' object "):
        message = words_of(error)
    return message[:LONGEST] + f"{' ' if message else ''}({where})" if where else message[:LONGEST]


def _scalar(value: object) -> object:
    """Return the Python value of a NumPy or torch scalar, and other values unchanged.

    Scalars are recognised by the attributes that both libraries define.
    """
    if getattr(value, "shape", None) == () and callable(item := getattr(value, "item", None)):
        return item()
    return value


def _shown(value: object) -> str:
    return repr(value)[:100]


FIRST = 8
"""Number of failures with the same error after which a run is stopped, if no episode has succeeded."""


class FirstFailures:
    """Stops a run whose first episodes all fail with the same error, before hundreds of episodes are started."""

    def __init__(self, bound: float) -> None:
        """Set the share of failed episodes that the run accepts (`training.max_failed_share`)."""
        self._bound = bound
        self._succeeded = False
        self._failed: dict[str, list[Episode]] = {}

    def note(self, episode: Episode, running: int) -> None:
        """Count an ended episode, given the number of `running` episodes. Raises TrainingHalted if the run should be stopped.

        Errors that differ only in numbers are counted as equal. Slow episodes may still succeed after fast episodes have failed, so
        the run is stopped only if the failures exceed the accepted share of all started episodes.
        """
        if self._succeeded or episode.error is None:
            self._succeeded = True
            self._failed.clear()
            return
        same = self._failed.setdefault(re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", episode.error), [])
        same.append(episode)
        ended = sum(map(len, self._failed.values()))
        if len(same) >= FIRST and len(same) > self._bound * (ended + running):
            raise TrainingHalted(
                f"{len(same)} episodes failed with the same error and none succeeded. Fix its cause, then resume the run: "
                f"{episode.error}",
                [Group(each.task, (each,)) for each in same],
            )


def halt_on_failures(groups: Sequence[Group], bound: float) -> None:
    """Raise TrainingHalted with the most frequent reason if more than the share `bound` of a step's episodes failed."""
    errors = [e.error for group in groups for e in group.episodes if e.error is not None]
    total = sum(len(group.episodes) for group in groups)
    if len(errors) > bound * total:
        reason, times = Counter(errors).most_common(1)[0]
        raise TrainingHalted(
            f"{len(errors)} of {total} episodes of this step failed, more than `training.max_failed_share` = "
            f"{bound}. The most frequent reason ({times} times): {reason}",
            groups,
        )
