"""Traces: what each token of a kept episode was credited with, as a run records it beside its episodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kapelle.viewer.episode import FORMS, Episode, Turn
from kapelle.viewer.episode_lines import newest_traces, trace_lines
from kapelle.viewer.lines import parsed

NEWEST = 4
"""Files of traces that the vocabulary is gathered from."""
_LINE = re.compile(rb'\{"format":\d{1,6},"step":\d{1,12},"line":(\d{1,12}),')
"""How the writer begins a row: what tells whose trace it is without parsing it."""


def trace_of(run: Path, split: str, step: int, line: int) -> dict[int, Mapping[str, Any]]:
    """Return an episode's trace, by the index of the turn; empty where none was kept."""
    if split != "train":
        return {}
    for raw in trace_lines(run, step):
        row = parsed(raw) if _line(raw) in (None, line) else None
        if row is not None and row.get("line") == line and row.get("format") in FORMS:
            turns = row.get("turns")
            found = turns if isinstance(turns, list) else []
            return {
                each["index"]: each
                for each in found
                if isinstance(each, dict) and isinstance(each.get("index"), int)
            }
    return {}


def traced(run: Path, step: int) -> set[int]:
    """Return the lines of a step's episodes that have a trace."""
    found = set()
    for raw in trace_lines(run, step):
        line = _line(raw)
        if line is None and isinstance(own := (parsed(raw) or {}).get("line"), int):
            line = own
        if line is not None:
            found.add(line)
    return found


def vocabulary_of(run: Path, episode: Episode, trace: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return pieces of text by token id, as far as traces of the run show them."""
    found: dict[int, str] = {}
    for step in newest_traces(run, NEWEST):
        for raw in trace_lines(run, step):
            pieces = (parsed(raw) or {}).get("vocabulary")
            if isinstance(pieces, dict):
                found |= {
                    int(key): str(piece)
                    for key, piece in pieces.items()
                    if str(key).isdecimal() and len(str(key)) < 12
                }
    for turn in episode.turns:
        pieces = trace.get(turn.index, {}).get("pieces")
        if isinstance(pieces, list):
            found |= {token: str(piece) for token, piece in zip(turn.ids, pieces, strict=False)}
    return found


def prompt_of(turn: Turn, vocabulary: Mapping[int, str]) -> str | None:
    """Return a turn's prompt as the model read it; None where not all of its tokens are known."""
    pieces = [vocabulary.get(token) for token in turn.prompt]
    return None if None in pieces else "".join(piece for piece in pieces if piece is not None)


def _line(raw: bytes) -> int | None:
    found = _LINE.match(raw, 0, 80)
    return None if found is None else int(found[1])
