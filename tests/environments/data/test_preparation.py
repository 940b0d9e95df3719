"""Prepared data sets: environments read the files, train and test never overlap, and no file is overwritten."""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import call

from kapelle.environments.code import Code
from kapelle.environments.data.preparation import DATA_SETS, prepare
from kapelle.environments.math import Math
from kapelle.environments.nli import NLI
from kapelle.errors import DataError, RunDirectoryError
from kapelle.types import Split

Rows = Sequence[Mapping[str, Any]]


def hub(monkeypatch: pytest.MonkeyPatch, splits: Mapping[str, Rows]) -> list[tuple[str, str | None, str]]:
    """Fake the hub's client; return the list of its calls."""
    calls: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, config: str | None, split: str) -> Rows:
        calls.append((path, config, split))
        return splits[split]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.is_progress_bar_enabled = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("kapelle.environments.data.source.hub_fault", lambda *_: None)
    return calls


def gsm8k(count: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {"question": f"What is {k} + 1?", "answer": f"Add.\n#### {k + 1}"}
        for k in range(start, start + count)
    ]


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def test_a_hub_data_set_becomes_files_that_the_environment_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaked = [{"question": "what  is 100 + 1?", "answer": "#### 101"}]
    calls = hub(monkeypatch, {"train": [*gsm8k(20), *gsm8k(1), *leaked], "test": gsm8k(5, 100)})
    prepared = prepare("gsm8k", tmp_path / "out")
    assert calls == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "README.md", "manifest.json", "test.jsonl", "train.jsonl",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == prepared.manifest
    assert (manifest["source"], manifest["train_rows_that_are_tested"]) == ("openai/gsm8k", 1)
    for split, rows in (("train", 20), ("test", 5)):
        own = manifest["splits"][split]
        assert own["rows"] == rows, "repeated rows count once, and test rows are excluded"
        assert own["sha256"] == hashlib.sha256((tmp_path / "out" / own["file"]).read_bytes()).hexdigest()
    environment = Math(path=str(tmp_path / "out"))
    assert (environment.size("train"), environment.size("test")) == (20, 5)
    assert environment.task("test", 0).data["answer"] == "101"
    with pytest.raises(RunDirectoryError, match="exists"):
        prepare("gsm8k", tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


def test_a_set_without_a_test_split_is_divided_by_a_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"problem": f"p {k}", "solution": rf"\boxed{{{k}}}", "answer": str(k)} for k in range(300)]
    hub(monkeypatch, {"train": [*rows, {"problem": "P  7", "solution": "", "answer": "7"}]})
    prepare("deepscaler", tmp_path / "out", test_share=0.2, form="parquet")
    environment = Math(path=str(tmp_path / "out"))
    splits: tuple[Split, ...] = ("train", "test")
    sizes = {split: environment.size(split) for split in splits}
    assert 40 < (sizes["test"] or 0) < 80
    questions = {
        split: {" ".join(environment.task(split, k).question.split()).casefold() for k in range(size or 0)}
        for split, size in sizes.items()
    }
    assert not questions["train"] & questions["test"]
    assert len(questions["train"] | questions["test"]) == 300


def test_unusable_rows_are_excluded_up_to_a_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [{"question": "no answer", "answer": " "}, {"question": " ", "answer": "#### 3"}]
    hub(monkeypatch, {"train": [*gsm8k(30), *bad], "test": gsm8k(5, 100)})
    with pytest.raises(DataError, match="2 of 32 rows"):
        prepare("gsm8k", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    left = prepare("gsm8k", tmp_path / "out", max_unusable=0.1).manifest["excluded"]["train"]
    assert (left["count"], left["of"]) == (2, 32)
    assert "row 31" in left["first"][0]


def test_the_command_writes_them_and_prints_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, rows in (("train", gsm8k(12)), ("held", gsm8k(4, 50))):
        (folder / f"{name}.jsonl.gz").write_bytes(
            gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
        )
    out = tmp_path / "prepared"
    missing = call("data", "prepare", "gsm8k", "--source", str(folder), "--out", str(out))
    assert missing.code == 2
    assert "held.jsonl.gz" in missing.err
    result = call("data", "prepare", "gsm8k", "--source", str(folder), "--test", "held", "--out", str(out))
    assert result.code == 0, result.err
    assert "12 rows" in result.out
    assert f"environment.name=math environment.path={out}" in result.out
    Math(path=str(out)).check(["solver"])


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder", "words", "sizes"),
    [
        ("gsm8k", "gsm8k", {}, (7473, 1319)),
        ("mbpp", "mbpp", {}, (371, 500)),
        ("anli", "anli", {"train": ["r1_dev", "r2_dev"], "test": ["r3_dev"]}, (2000, 1198)),
        pytest.param("math", "deepscaler_parts", {"test": ["test_amc"]}, (7470, 83), marks=pytest.mark.long),
        pytest.param(
            "deepscaler",
            "deepscaler_parts",
            {"train": ["train_math", "train_aime"]},
            None,
            marks=pytest.mark.long,
        ),
        pytest.param("deepmath", "deepmath_sample", {}, None, marks=pytest.mark.long),
    ],
)
def test_real_files(
    data_folder: Path,
    tmp_path: Path,
    name: str,
    folder: str,
    words: dict[str, Any],
    sizes: tuple[int, int] | None,
) -> None:
    if not (data_folder / folder).is_dir():
        pytest.skip(f"there is no folder {data_folder / folder}")
    prepare(name, tmp_path / name, source=str(data_folder / folder), **words)
    chosen = DATA_SETS[name]
    train, test = (lines(tmp_path / name / f"{split}.jsonl") for split in ("train", "test"))
    keys = [{" ".join(str(row[chosen.key[0]]).split()).casefold() for row in rows} for rows in (train, test)]
    assert not keys[0] & keys[1]
    if sizes is not None:
        assert (len(train), len(test)) == sizes
    path = str(tmp_path / name)
    environment: Any = {"math": Math, "nli": NLI, "code": Code}[chosen.environment](path=path)
    read = [environment.size(split) for split in ("train", "test")]
    assert read == [len(train), len(test)]
    assert environment.skipped() == {}
