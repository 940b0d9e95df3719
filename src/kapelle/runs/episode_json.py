"""Episodes as JSON rows and back, every field exact.

A row is one episode: the fields of `Episode`, `Turn`, `Message` and `Task` under their own names, preceded by
`step` and `group` (the number of its group within the step). `versions` stands only in turns that have it. Floats are written with all their digits. A reward that
is not finite, which only a failed episode has, is `{"$float": "nan"}`; tuples inside `task.data` and `info` are tagged
in the same way, see `exact_json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from kapelle.errors import DataError
from kapelle.runs.exact_json import decode, encode
from kapelle.types import Episode, Group, Json, Message, Payment, Task, Turn


def dump_groups(step: int, groups: Iterable[Group]) -> bytes:
    """Return the JSON lines of a step's groups, one line per episode.

    Raises DataError for an episode whose `info` or `task.data` holds what JSON cannot.
    """
    lines = [
        dump_episode(episode, step=step, group=place)
        for place, group in enumerate(groups)
        for episode in group.episodes
    ]
    return b"".join(lines)


def dump_episode(episode: Episode, **labels: int) -> bytes:
    """Return one JSON line: the labels, then the fields of the episode."""
    row: dict[str, Json] = {**labels, **_fields(episode)}
    try:
        row["task"] = {**_fields(episode.task), "data": encode(episode.task.data, "task.data")}
        row["info"] = encode(episode.info, "info")
        row["rewards"] = {agent: _number(reward) for agent, reward in episode.rewards.items()}
        row["success"] = _number(episode.success)
        row["turns"] = [_turn_row(turn) for turn in episode.turns]
        row["branches"] = [_turn_row(turn) for turn in episode.branches]
        row["payments"] = [{**_fields(each), "reward": _number(each.reward)} for each in episode.payments]
        # Escaping all but ASCII keeps lone surrogates, which UTF-8 cannot hold.
        return json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"Episode of task '{episode.task.id}' cannot be recorded: {error}. "
            "Let the environment put only text, numbers, lists and mappings there."
        ) from error


def load_episode(row: Mapping[str, Json]) -> Episode:
    """Return the episode of a row; raises DataError for a row in another form."""
    try:
        values = {field.name: row[field.name] for field in fields(Episode)}
        values["task"] = Task(**{**values["task"], "data": decode(values["task"]["data"])})
        values["agents"] = tuple(values["agents"])
        values["turns"] = tuple(_turn(turn) for turn in values["turns"])
        values["branches"] = tuple(_turn(turn) for turn in values["branches"])
        values["payments"] = tuple(Payment(**decode(payment)) for payment in values["payments"])
        for name in ("rewards", "info", "success"):
            values[name] = decode(values[name])
        return Episode(**values)
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"An episode's row has another form ({error!r}). Read it with the version of kapelle that wrote it."
        ) from error


def load_groups(rows: Iterable[Mapping[str, Json]]) -> list[Group]:
    """Return the groups of one step's rows, in the order in which they were recorded; DataError for damaged rows."""
    episodes: dict[int, list[Episode]] = {}
    for row in rows:
        episodes.setdefault(row["group"], []).append(load_episode(row))
    try:
        return [Group(members[0].task, tuple(members)) for members in episodes.values()]
    except AssertionError as error:
        raise DataError(f"The rows of a group do not belong together: {error}.") from error


def _fields(value: Episode | Turn | Task | Message | Payment) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _number(value: float | None) -> Json:
    return value if value is None or math.isfinite(value) else encode(value, "")


def _turn_row(turn: Turn) -> dict[str, Json]:
    row = _fields(turn)
    row["logprobs"] = [_number(logprob) for logprob in turn.logprobs]
    row["reward"] = _number(turn.reward)
    row["heard"] = [_fields(message) for message in turn.heard]
    if not turn.versions:
        del row["versions"]
    return row


def _turn(row: Mapping[str, Json]) -> Turn:
    values = dict(row)
    for name in ("prompt_ids", "completion_ids"):
        values[name] = tuple(values[name])
    values["logprobs"] = tuple(decode(values["logprobs"]))
    values["reward"] = decode(values["reward"])
    values["heard"] = tuple(Message(**message) for message in values["heard"])
    values["versions"] = tuple((version, tokens) for version, tokens in values.get("versions", ()))
    return Turn(**values)
