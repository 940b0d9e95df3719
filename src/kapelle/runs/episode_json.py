"""Converts episodes and traces to JSON rows that preserve every field of an episode exactly.

A row is one episode. The row contains `step` and `group` (the number of the group within the step), followed by the
fields of `Episode`, `Turn`, `Message` and `Task` under their own names. Some fields are omitted if they are empty. The
omitted fields are `versions`, `constraint`, `caller` and `copied` of turns, `interventions`, `final` (the team's
answer, if the workflow defines one), and `images`. Turns and messages refer to images by their hashes. The field
`images` of the row maps each hash to the type of the image and, unless the image is stored in a file, its
base64-encoded bytes. Floats are written with all their digits. A reward that is not finite, which occurs only in failed
episodes, is written as `{"$float": "nan"}`. Tuples in `task.data` and `info` are tagged in the same way.
"""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kapelle.errors import DataError
from kapelle.runtime.wire.exact_json import decode, encode
from kapelle.types import (
    SIGNATURES,
    Cast,
    Constraint,
    Episode,
    Group,
    Image,
    Intervention,
    Json,
    Message,
    RewardEvent,
    Routing,
    Task,
    Turn,
)


def dump_groups(step: int, groups: Iterable[Group], keep: Keep | None = None) -> bytes:
    """Return the JSON lines of the groups of a step, with one line per episode. The argument `keep` is described in `dump_episode`.

    Raises DataError if the `info` or `task.data` of an episode cannot be represented in JSON.
    """
    lines = [
        dump_episode(episode, keep, step=step, group=place)
        for place, group in enumerate(groups)
        for episode in group.episodes
    ]
    return b"".join(lines)


NAMED = re.compile(r"[0-9a-f]{32}")

Keep = Callable[[Image], object]
"""A function that stores an image outside of the row."""
Find = Callable[[str], bytes]
"""A function that returns the bytes of an image by the name of its file, or empty bytes if the file is missing."""


def dump_episode(episode: Episode, keep: Keep | None = None, **labels: int) -> bytes:
    """Return a JSON line with the labels, followed by the fields of the episode.

    If `keep` is given, it is called with every image, and the line contains only the names of images. If `keep` is
    given, the line also omits the routing to experts (`Turn.routing`), which is needed only for training.
    """
    row: dict[str, Json] = {**labels, **_fields(episode)}
    try:
        row["task"] = {**_fields(episode.task), "data": encode(episode.task.data, "task.data")}
        if episode.task.cast:
            row["task"]["cast"] = {agent: _fields(cast) for agent, cast in episode.task.cast.items()}
        else:
            del row["task"]["cast"]
        row["task"]["messages"] = [[_by_hash(_fields(m)) for m in read] for read in episode.task.messages]
        for name in ("system", "messages", "rendered"):
            if not row["task"][name]:
                del row["task"][name]
        row["info"] = encode(episode.info, "info")
        row["rewards"] = {agent: _number(reward) for agent, reward in episode.rewards.items()}
        row["success"] = _number(episode.success)
        row["turns"] = [_turn_row(turn, whole=keep is None) for turn in episode.turns]
        row["branches"] = [_turn_row(turn, whole=keep is None) for turn in episode.branches]
        seen = {image.hash: image for turn in (*episode.turns, *episode.branches) for image in turn.images}
        if seen:
            row["images"] = {
                name: {"media": image.media} if keep else {"media": image.media, "data": b64(image.data)}
                for name, image in seen.items()
            }
        for image in seen.values() if keep else ():
            assert keep is not None
            keep(image)
        if episode.final is None:
            del row["final"]
        if not episode.interventions:
            del row["interventions"]
        else:
            row["interventions"] = [
                {
                    **_fields(each),
                    "returns": [{a: _number(r) for a, r in one.items()} for one in each.returns],
                }
                for each in episode.interventions
            ]
        row["reward_events"] = [
            {**_fields(each), "reward": _number(each.reward)} for each in episode.reward_events
        ]
        # Escaping everything except ASCII preserves lone surrogates, which UTF-8 cannot represent.
        return json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"Episode of task '{episode.task.id}' cannot be recorded: {error}. "
            "An environment may store only strings, numbers, lists and mappings there."
        ) from error


def b64(data: bytes) -> str:
    """Return bytes as a base64 string."""
    return base64.b64encode(data).decode("ascii")


def load_episode(row: Mapping[str, Json], find: Find | None = None) -> Episode:
    """Convert a row to an episode. Raises DataError if the row has an unknown format.

    The function `find` returns the bytes of images that the row does not contain.
    """
    try:
        images: dict[str, Image] = {}
        for name, each in row.get("images", {}).items():
            if not NAMED.fullmatch(name) or each["media"] not in SIGNATURES:  # the names are file names
                raise ValueError(f"an invalid image name: {name!r:.60}")
            image = Image(name, each["media"], base64.b64decode(each.get("data", "")))
            if "data" not in each and find is not None:
                image = replace(image, data=find(image.file))
            images[name] = image
        optional = ("interventions", "final")
        values = {field.name: row[field.name] for field in fields(Episode) if field.name not in optional}
        task = {**values["task"]}
        cast = {agent: Cast(**each) for agent, each in task.pop("cast", {}).items()}
        read = tuple(tuple(Message(**each) for each in one) for one in task.pop("messages", ()))
        values["task"] = Task(**{**task, "data": decode(task["data"]), "cast": cast, "messages": read})
        values["agents"] = tuple(values["agents"])
        values["turns"] = tuple(_turn(turn, images) for turn in values["turns"])
        values["branches"] = tuple(_turn(turn, images) for turn in values["branches"])
        values["reward_events"] = tuple(RewardEvent(**decode(payment)) for payment in values["reward_events"])
        for name in ("rewards", "info", "success"):
            values[name] = decode(values[name])
        values["interventions"] = tuple(_intervention(each) for each in row.get("interventions", ()))
        return Episode(**values, final=row.get("final"))
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise DataError(
            f"The row of an episode has an unknown format ({error!r}). Read it with the version of "
            "kapelle that wrote it."
        ) from error


def load_groups(rows: Iterable[Mapping[str, Json]], find: Find | None = None) -> list[Group]:
    """Return the groups in the rows of one step, in the recorded order. Raises DataError for damaged rows."""
    episodes: dict[int, list[Episode]] = {}
    for row in rows:
        episodes.setdefault(row["group"], []).append(load_episode(row, find))
    try:
        return [Group(members[0].task, tuple(members)) for members in episodes.values()]
    except AssertionError as error:
        raise DataError(f"The rows of a group belong to different tasks: {error}.") from error


def _fields(
    value: Cast | Constraint | Episode | Turn | Task | Message | RewardEvent | Routing | Intervention,
) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _number(value: float | None) -> Json:
    return value if value is None or math.isfinite(value) else encode(value, "")


def _turn_row(turn: Turn, *, whole: bool) -> dict[str, Json]:
    row = _fields(turn)
    routing = row.pop("routing")
    if routing is not None and whole:
        row["routing"] = {**_fields(routing), "data": b64(zlib.compress(routing.data))}
    if turn.constraint is not None:
        row["constraint"] = _fields(turn.constraint)
    row["logprobs"] = [_number(logprob) for logprob in turn.logprobs]
    row["reward"] = _number(turn.reward)
    row["new_messages"] = [_by_hash(_fields(message)) for message in turn.new_messages]
    for name in ("versions", "copied", "constraint", "usage", "thoughts", "dropped", "summary"):
        if not row[name]:
            del row[name]
    if turn.caller is None:
        del row["caller"]
    return _by_hash(row)


def _intervention(row: Mapping[str, Json]) -> Intervention:
    returns = tuple(decode(each) for each in row["returns"])
    return Intervention(row["what"], tuple(row["agents"]), row["turn"], returns)


def _by_hash(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in which images are replaced by their hashes."""
    images = row.pop("images")
    if row.get("structured", "") is None:
        del row["structured"]
    return {**row, "images": [image.hash for image in images]} if images else row


def _turn(row: Mapping[str, Json], images: Mapping[str, Image]) -> Turn:
    values = dict(row)
    for name in ("prompt_ids", "completion_ids"):
        values[name] = tuple(values[name])
    values["logprobs"] = tuple(decode(values["logprobs"]))
    values["reward"] = decode(values["reward"])
    values["new_messages"] = tuple(
        Message(**_with_images(message, images)) for message in values["new_messages"]
    )
    values["versions"] = tuple((version, tokens) for version, tokens in values.get("versions", ()))
    if constraint := values.get("constraint"):
        values["constraint"] = Constraint(**constraint)
    if usage := values.get("usage"):
        values["usage"] = (usage[0], usage[1])
    if routing := values.get("routing"):
        values["routing"] = Routing(**{**routing, "data": zlib.decompress(base64.b64decode(routing["data"]))})
    return Turn(**_with_images(values, images))


def _with_images(row: Mapping[str, Json], images: Mapping[str, Image]) -> dict[str, Any]:
    return {**row, "images": tuple(images[name] for name in row.get("images", ()))}


# -------- Traces: the credit of each token of a few episodes, stored by step in the folder `traces`, in the format of
# `step_rows`.
#
# A step without traced episodes has no rows. A row is one episode of the step: `format` (1), `step`, `line` (its
# position in the step's file of episodes, from 0), `turns` and `vocabulary`. A turn has its `index` and, for each of
# its completion tokens: `pieces` (the token as text), `advantage`, `credit`, `ratio`, `entropy` (nats; absent if the
# engine does not report it). `vocabulary` has the text of each token of its prompts, by id; in the first row of a step,
# also that of each sampled token of the step. Numbers have six digits; a
# non-finite number is null.

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """The recorded numbers of one turn, token by token."""

    index: int
    pieces: Sequence[str]
    advantage: Sequence[float]
    """The advantage of each token."""
    credit: Sequence[float]
    """The share of each token in the update of the policy: weight × advantage, divided by the sum of the absolute values of
    these products in the step."""
    ratio: Sequence[float]
    """The probability of each token after the update divided by the probability with which it was sampled."""
    entropy: Sequence[float] = ()
    """The entropy of the distribution of each token after the update, in nats."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one episode."""

    line: int
    """The line of the episode in the file of the step, from 0."""
    turns: Sequence[TracedTurn]
    vocabulary: Mapping[int, str] = field(default_factory=dict)


def dump_traces(step: int, traces: Iterable[Trace]) -> bytes:
    """Return the JSON lines of the traces of a step."""
    lines = []
    for trace in traces:
        turns: list[dict[str, Json]] = []
        for turn in trace.turns:
            turns.append({"index": turn.index, "pieces": list(turn.pieces)})
            for name in ("advantage", "credit", "ratio", "entropy"):
                values: Sequence[float] = getattr(turn, name)
                if len(values):
                    turns[-1][name] = [
                        float(f"{value:.6g}") if math.isfinite(value) else None for value in values
                    ]
        row = {
            "format": FORMAT,
            "step": step,
            "line": trace.line,
            "turns": turns,
            "vocabulary": {str(token): piece for token, piece in sorted(trace.vocabulary.items())},
        }
        lines.append(json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n")
    return b"".join(lines)
