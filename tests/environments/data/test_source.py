from __future__ import annotations

import csv
import gzip
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from kapelle.environments.data.source import DataSource, Splits
from kapelle.errors import DataError
from kapelle.runs.step_rows import pack
from kapelle.runtime.row_files import read_rows

ROWS = [{"question": f"q{number}", "answer": number} for number in range(6)]


def source(
    path: Path | str, train: str = "train", test: str = "test", config: str | None = None
) -> DataSource:
    return DataSource(str(path), config, train, test, test_share=0.3)


def load(path: Path | str, train: str = "train", test: str = "test", config: str | None = None) -> Splits:
    return source(path, train, test, config).load("question", "question_field")


def lines(rows: list[dict[str, object]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def questions(splits: Splits) -> tuple[list[object], list[object]]:
    return [row.fields["question"] for row in splits.train], [row.fields["question"] for row in splits.test]


def fill(folder: Path, train: bytes, test: bytes = lines(ROWS[4:])) -> Path:
    (folder / "train.jsonl").write_bytes(train)
    (folder / "test.jsonl").write_bytes(test)
    return folder


EXPECTED = (["q0", "q1", "q2", "q3"], ["q4", "q5"])


def test_every_file_format_gives_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    for suffix in ("jsonl", "jsonl.gz", "json", "json.gz", "jsonl.zst", "parquet", "csv"):
        folder = tmp_path / suffix
        folder.mkdir()
        for name, rows in (("train", ROWS[:4]), ("test", ROWS[4:])):
            file = folder / f"{name}.{suffix}"
            if suffix == "parquet":
                parquet.write_table(Table.from_pylist(rows), file)
                continue
            if suffix == "csv":
                with file.open("w", encoding="utf-8-sig", newline="") as text:  # as spreadsheets write it
                    table = csv.DictWriter(text, rows[0])
                    table.writeheader()
                    table.writerows(rows)
                continue
            content = lines(rows) if "jsonl" in suffix else json.dumps(rows).encode()
            if suffix.endswith("zst"):  # as runs write it, and as `zstd` does
                content = pack(7, content.splitlines(keepends=True)[:1]) + zstandard.compress(
                    b"".join(content.splitlines(keepends=True)[1:])
                )
            file.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
        assert questions(load(folder)) == EXPECTED, suffix


def test_values_of_a_csv_file_may_contain_commas_quotes_and_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('prompt,answer\r\n"1,5 + 1?\nSay ""2,5"".","2,5"\r\n\r\n2+2,4\r\n', "utf-8", newline="")
    first, second = read_rows(file)
    assert first.fields == {"prompt": '1,5 + 1?\nSay "2,5".', "answer": "2,5"}
    assert (second.fields, second.place) == ({"prompt": "2+2", "answer": "4"}, f"{file}, line 5")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"prompt,answer\n1,5 + 1?,2\n", "line 2 has 3 values, but the first line names 2 columns"),
        (b"prompt,answer\n1+1?\n", "line 2 has 1 values"),
        (b"prompt,prompt\n1+1?,2\n", "has the key 'prompt' twice"),
        (b'prompt,answer\n"1+1?,2\n', "cannot be read as CSV: unexpected end of data"),
        (b"prompt,answer\n1+1?,\xff\n", "Save it as CSV in UTF-8"),
    ],
)
def test_a_damaged_csv_file_is_an_error(tmp_path: Path, text: bytes, said: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(text)
    with pytest.raises(DataError, match=said):
        read_rows(file)


@pytest.mark.parametrize(
    "broken", [lambda whole: whole[:-3], lambda whole: whole[:30], lambda _: b"no frames at all"]
)
def test_truncated_compressed_rows_are_an_error(tmp_path: Path, broken: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "rows.jsonl.zst"
    file.write_bytes(broken(zstandard.compress(lines(ROWS) * 50)))
    with pytest.raises(DataError, match="truncated"):
        read_rows(file)


def test_shards_are_found_in_the_folder_of_the_configuration(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import Table, parquet

    (tmp_path / "main").mkdir()
    for name, rows in (
        ("train-00000-of-00002", ROWS[:2]),
        ("train-00001-of-00002", ROWS[2:4]),
        ("test-0", ROWS[4:]),
    ):
        parquet.write_table(Table.from_pylist(rows), tmp_path / "main" / f"{name}.parquet")
    assert questions(load(tmp_path, config="main")) == EXPECTED


def test_blank_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    splits = load(fill(tmp_path, b"\n" + lines(ROWS[:1]) + b"\n\n" + lines(ROWS[1:2])))
    assert [row.place.rpartition(", ")[2] for row in splits.train] == ["line 2", "line 5"]


def test_one_file_is_divided_by_a_hash_of_each_question(tmp_path: Path) -> None:
    file = tmp_path / "all.jsonl"
    rows: list[dict[str, object]] = [{"question": f"q{k}", "answer": k} for k in range(500)]
    file.write_bytes(lines([*rows, *rows]))
    train, test = questions(load(file))
    assert not set(train) & set(test)
    assert 0.22 < len(test) / 1000 < 0.38
    shuffled = tmp_path / "shuffled.jsonl"
    shuffled.write_bytes(lines(rows[::-1]))
    assert set(questions(load(shuffled))[1]) == set(test)


def test_train_rows_in_the_test_split_are_excluded_and_counted(tmp_path: Path) -> None:
    splits = load(fill(tmp_path, lines(ROWS[:5]), lines(ROWS[3:])))
    assert questions(splits) == (["q0", "q1", "q2"], ["q3", "q4", "q5"])
    assert splits.duplicates == 2


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (lines(ROWS[:2]) + b"{oops\n", r"train.jsonl, line 3"),
        (
            b'{"question": "1", "answer": "1", "answer": "2"}\n',
            "twice",
        ),
        (b'{"question": "1", "answer": ' + b"9" * 5000 + b"}\n", r"line 1 has an integer .* in quotes"),
        (lines(ROWS[:2]) + b"[1]\n", r"line 3 is list, not an object"),
        (lines(ROWS[:2]) + b'{"question": "\xff"}\n', r"line 3 is not valid JSON"),
        (b'{"Question": "q"}\n', "Did you mean 'Question'"),
        (b'{"question": null}\n', "NoneType"),
        (b'{"question": true}\n', "bool"),
        (b"[" * 100_000 + b"\n", r"nested too deeply|not (valid )?JSON"),
        (b"", "empty"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_bad_row_is_an_error_with_its_line(tmp_path: Path, train: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(fill(tmp_path, train))


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    whole = gzip.compress(lines(ROWS * 50))
    fill(tmp_path, b"").joinpath("train.jsonl").unlink()
    file = tmp_path / "train.jsonl.gz"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="truncated"):
        load(tmp_path)
    file.write_bytes(b"\x00" + whole)
    with pytest.raises(DataError, match="damaged"):
        load(tmp_path)
    file.write_bytes(whole[:20] + b"\xff\xff\xff\xff" + whole[24:])
    with pytest.raises(DataError, match=r"damaged|not JSON"):
        load(tmp_path)


def test_a_missing_file_is_an_error_that_lists_the_others(tmp_path: Path) -> None:
    fill(tmp_path, lines(ROWS[:4]))
    with pytest.raises(DataError, match=r"test\.jsonl, train\.jsonl"):
        load(tmp_path, test="validation")
    with pytest.raises(DataError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no file or folder"):
        load("data/gsm8k.jsonl")
    odd = tmp_path / "rows.tsv"
    odd.write_bytes(b"question,answer\n")
    with pytest.raises(DataError, match="format is unknown"):
        load(odd)


def hub(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    def load_dataset(path: str, config: str | None, *, split: str) -> object:
        assert (path, config) == ("owner/name", "main")
        if isinstance(answer, Exception):
            raise answer
        return ROWS[:4] if split == "train" else ROWS[4:]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    fake.is_progress_bar_enabled = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    monkeypatch.setattr("kapelle.environments.data.source.hub_fault", lambda *_: None)


def test_a_hub_name_is_loaded_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, None)
    assert questions(load("owner/name", config="main")) == EXPECTED


def test_an_unreachable_hub_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, ConnectionError("no route\nand much more"))
    with pytest.raises(DataError, match="no route"):
        load("owner/name", config="main", train="train2")
