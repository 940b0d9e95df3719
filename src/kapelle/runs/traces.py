"""Traces: what each token of a few episodes was credited with, by step in the folder `traces`, in files of the form of `step_rows`.

A step of which none was kept has no rows. A row is one episode of the step: `format` (1), `step`, `line` (its place in the step's file of episodes, from 0), `turns`
and `vocabulary`. A turn has its `index` and, for each of its completion tokens: `pieces` (the token as text),
`advantage`, `credit`, `ratio`, `entropy` (nats; absent where the engine does not say). `vocabulary` has the text of
each token of its prompts, by id. Numbers have six digits; one that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kapelle.types import Json

FORMAT = 1


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """One turn, token by token."""

    index: int
    pieces: Sequence[str]
    advantage: Sequence[float]
    """What the algorithm credited the token with."""
    credit: Sequence[float]
    """Its share in what the step asks of its policy: weight × advantage, over the sum of their magnitudes in the step."""
    ratio: Sequence[float]
    """Probability after the update over the probability with which it was sampled."""
    entropy: Sequence[float] = ()
    """Of its distribution after the update, nats."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One episode."""

    line: int
    """Its place in the step's file of episodes, from 0."""
    turns: Sequence[TracedTurn]
    vocabulary: Mapping[int, str] = field(default_factory=dict)


def dump_traces(step: int, traces: Iterable[Trace]) -> bytes:
    """Return the JSON lines of a step's traces."""
    rows = [
        {
            "format": FORMAT,
            "step": step,
            "line": trace.line,
            "turns": [_turn(turn) for turn in trace.turns],
            "vocabulary": {str(token): piece for token, piece in sorted(trace.vocabulary.items())},
        }
        for trace in traces
    ]
    lines = [json.dumps(row, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n" for row in rows]
    return b"".join(lines)


def _turn(turn: TracedTurn) -> dict[str, Json]:
    row: dict[str, Json] = {"index": turn.index, "pieces": list(turn.pieces)}
    for name in ("advantage", "credit", "ratio", "entropy"):
        values: Sequence[float] = getattr(turn, name)
        if len(values):
            row[name] = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
    return row
