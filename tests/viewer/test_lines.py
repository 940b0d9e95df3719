from __future__ import annotations

from pathlib import Path

import pytest

from kapelle.viewer.lines import LONGEST, Tail, number, parsed


def append(file: Path, content: bytes) -> None:
    with file.open("ab") as opened:
        opened.write(content)


def test_each_row_is_read_once_and_half_a_row_when_it_is_whole(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "rows.jsonl")
    assert tail.read() == ([], False)
    append(tail.path, b'{"a": 1}\n{"a": 2}\n{"a": ')
    assert tail.read() == ([{"a": 1}, {"a": 2}], False)
    assert tail.read() == ([], False)
    append(tail.path, b"3}\n")
    assert tail.read() == ([{"a": 3}], False)


def test_a_file_that_was_cut_is_read_anew(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "rows.jsonl")
    append(tail.path, b'{"a": 1}\n{"a": 2}\n')
    tail.read()
    tail.path.write_bytes(b'{"a": 1}\n')
    assert tail.read() == ([{"a": 1}], True)


def test_one_that_was_cut_and_has_grown_beyond_is_read_anew_too(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "rows.jsonl")
    append(tail.path, b'{"a": 1}\n{"a": 2}\n')
    tail.read()
    tail.path.write_bytes(b'{"a": 1}\n{"b": 2}\n{"b": 3}\n')
    assert tail.read() == ([{"a": 1}, {"b": 2}, {"b": 3}], True)


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\x00", b"[" * 100_000, b'{"a": ' + b"1" * 10_000 + b"}", b"[1]", b"null", b'{"a"', b"\x00"],
)
def test_a_damaged_line_is_counted_and_left_out(line: bytes, tmp_path: Path) -> None:
    tail = Tail(tmp_path / "rows.jsonl")
    append(tail.path, b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert tail.read()[0] == [{"a": 1}, {"a": 2}]
    assert tail.damaged == 1


def test_a_line_beyond_the_limit_is_not_parsed() -> None:
    assert parsed(b'{"a": "' + b"x" * LONGEST + b'"}') is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1", None, [1], 10**400])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert number(value) is None
    assert number(3) == 3.0
