"""Traces: what each token of a kept episode was credited with, as a run records it beside its episodes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kapelle.viewer.episode import FORMS, Episode, Turn, rows_of

NEWEST = 4
"""Files of traces that the vocabulary is gathered from."""


def trace_of(run: Path, split: str, step: int, line: int) -> dict[int, Mapping[str, Any]]:
    """Return an episode's trace, by the index of the turn; empty where none was kept."""
    if split != "train":
        return {}
    for _, row in rows_of(run / "traces" / f"{step:08d}.jsonl"):
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
    rows = rows_of(run / "traces" / f"{step:08d}.jsonl")
    return {row["line"] for _, row in rows if row is not None and isinstance(row.get("line"), int)}


def vocabulary_of(run: Path, episode: Episode, trace: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Return pieces of text by token id, as far as traces of the run show them."""
    found: dict[int, str] = {}
    files = sorted((run / "traces").glob("[0-9]*.jsonl"))[-NEWEST:]
    for path in files:
        for _, row in rows_of(path):
            pieces = (row or {}).get("vocabulary")
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
