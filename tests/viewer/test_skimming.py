"""A line that is skimmed says the same as one that is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.viewed_runs import write_run

from kapelle.runs.step_rows import pack
from kapelle.viewer import lines as episode_lines
from kapelle.viewer.episode import episode_of
from kapelle.viewer.lines import lines_of, parsed
from kapelle.viewer.skimming import _without_numbers, skimmed

TURN: dict[str, Any] = {
    "agent": "a",
    "prompt_ids": [1, 2],
    "completion_ids": [3, 4, 5],
    "logprobs": [-0.5, -1, -2],
    "text": "]",
    "reward": 1.5,
}
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"turns": [TURN, TURN | {"agent": "b", "completion_ids": [], "logprobs": []}], "rewards": {"a": 1, "b": 0}},
    "a list's name said": {"turns": [TURN | {"text": '"prompt_ids":[1],"completion_ids":[2],"logprobs":[3]'}]},
    "a list's name as a key": {"turns": [TURN], "info": {"final": 'x"prompt_ids":[', 'y"completion_ids': [1, 2]}},
    "not finite": {"turns": [TURN | {"logprobs": [{"$float": "nan"}, 1]}, TURN]},
    "text among ids": {"turns": [TURN | {"prompt_ids": ["]", '],"completion_ids":[9,9],"logprobs":['], "completion_ids": [1]}]},
    "commas in ids": {"turns": [TURN | {"completion_ids": ["a,b"]}]},
    "lists in lists": {"turns": [TURN | {"completion_ids": [[1, 2], 3]}]},
    "other order": {"turns": [{"logprobs": [1], "completion_ids": [1, 2], "prompt_ids": []}]},
    "nothing": {},
    "no turns": {"turns": {"a": TURN}, "rewards": [1], "task": "t", "success": "yes", "group": 1e99},
    "all else": {"turns": [TURN, 3, None], "task": {"id": 7, "question": None}, "error": {"a": 1}, "success": 0.5, "group": 4},
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_skimmed_fields_equal_those_of_the_parsed_row(row: dict[str, Any]) -> None:
    raw = json.dumps(row, separators=(",", ":")).encode()
    found, whole = skimmed(raw, 3), episode_of(parsed(raw) or {}, 3)
    assert found is not None
    assert (found.line, found.group, found.task, found.question) == (
        3,
        whole.group,
        whole.task,
        whole.question,
    )
    assert (found.success, found.reward, found.rewards) == (whole.success, whole.reward, whole.rewards)
    assert (found.final, found.error, found.tokens) == (whole.final, whole.error, whole.tokens)
    assert list(found.texts) == [turn.text for turn in whole.turns]


def test_tokens_of_recorded_rows_are_only_counted(tmp_path: Path) -> None:
    (raw, *_) = lines_of(write_run(tmp_path / "run", steps=1), "train", 1)
    short = _without_numbers(raw)
    assert short is not None
    assert b"logprobs" not in short
    assert json.loads(short)["turns"][0]["completion_ids"] == 13


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"turns":[{"prompt_ids":[1,2', b"\xff" * 9, b"[" * 9999])
def test_lines_without_an_episode_are_none(raw: bytes) -> None:
    assert skimmed(raw, 0) is None


def test_the_memory_for_lines_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "episodes" / "train"
    folder.mkdir(parents=True)
    (folder / "00000001.jsonl.zst").write_bytes(pack(1, [b"a" * 2_000_000 + b"\n"] * 8))
    assert len(lines_of(tmp_path, "train", 1)) == 8
    monkeypatch.setattr(episode_lines, "MOST", 5_000_000)
    assert len(lines_of(tmp_path, "train", 1)) == 2
