"""Prepared data sets: what is written is what environments read, train and test never overlap, nothing is overwritten."""

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

from kapelle.environment import environment_class
from kapelle.environments.code import Code
from kapelle.environments.data.preparation import DATA_SETS, prepare
from kapelle.environments.math import Math
from kapelle.environments.nli import NLI
from kapelle.errors import DataError, RunDirectoryError
from kapelle.types import Split

Rows = Sequence[Mapping[str, Any]]


def hub(monkeypatch: pytest.MonkeyPatch, splits: Mapping[str, Rows]) -> list[tuple[str, str | None, str]]:
    """Stand in for the hub's client; returns what it is asked for."""
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(path: str, config: str | None, split: str) -> Rows:
        asked.append((path, config, split))
        return splits[split]

    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    module.is_progress_bar_enabled = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("kapelle.environments.data.source.hub_fault", lambda *_: None)
    return asked


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
    asked = hub(monkeypatch, {"train": [*gsm8k(20), *gsm8k(1), *leaked], "test": gsm8k(5, 100)})
    prepared = prepare("gsm8k", tmp_path / "out")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "README.md", "manifest.json", "test.jsonl", "train.jsonl",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest == prepared.manifest
    assert (manifest["source"], manifest["train_rows_that_are_tested"]) == ("openai/gsm8k", 1)
    for split, rows in (("train", 20), ("test", 5)):
        said = manifest["splits"][split]
        assert said["rows"] == rows, "repeated rows count once, tested ones are not trained on"
        assert said["sha256"] == hashlib.sha256((tmp_path / "out" / said["file"]).read_bytes()).hexdigest()
    environment = Math(path=str(tmp_path / "out"))
    assert (environment.size("train"), environment.size("test")) == (20, 5)
    assert environment.task("test", 0).data["answer"] == "101"
    with pytest.raises(RunDirectoryError, match="nothing is overwritten"):
        prepare("gsm8k", tmp_path / "out")
    assert not list(tmp_path.glob(".*")), "nothing half written is left"


def test_a_set_without_test_questions_holds_some_out_by_a_hash_of_each(
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


def test_unusable_rows_are_left_out_by_name_up_to_a_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [{"question": "no answer", "answer": " "}, {"question": " ", "answer": "#### 3"}]
    hub(monkeypatch, {"train": [*gsm8k(30), *bad], "test": gsm8k(5, 100)})
    with pytest.raises(DataError, match=r"train: 2 of 32 rows cannot be used, more than .* = 1.0%: .*row 31"):
        prepare("gsm8k", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    left = prepare("gsm8k", tmp_path / "out", max_unusable=0.1).manifest["left_out"]["train"]
    assert (left["count"], left["of"]) == (2, 32)
    assert "row 31: the field 'answer' is empty" in left["first"][0]
    assert "row 32" in left["first"][1]


def test_every_data_set_names_an_environment_that_is_there() -> None:
    for chosen in DATA_SETS.values():
        assert environment_class(chosen.environment).__name__ in {"Math", "NLI", "Code"}
    with pytest.raises(DataError, match="Did you mean 'gsm8k'"):
        prepare("gsm8", Path("nowhere"))


def test_a_command_writes_them_and_says_how_to_train(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, rows in (("train", gsm8k(12)), ("held", gsm8k(4, 50))):
        (folder / f"{name}.jsonl.gz").write_bytes(
            gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
        )
    out = tmp_path / "prepared"
    missing = call("data", "prepare", "gsm8k", "--source", str(folder), "--out", str(out))
    assert missing.code == 2
    assert "has no file 'test'" in missing.err
    assert "It holds held.jsonl.gz, train.jsonl.gz" in missing.err
    said = call("data", "prepare", "gsm8k", "--source", str(folder), "--test", "held", "--out", str(out))
    assert said.code == 0, said.err
    assert "train       12 rows" in said.out
    assert f"environment.name=math environment.path={out}" in said.out
    again = call("data", "prepare", "gsm8k", "--source", str(folder), "--test", "held", "--out", str(out))
    assert again.code == 2
    assert "exists already" in again.err
    check = call("validate", "--environment", "math", f"environment.path={out}")
    assert check.code == 0, check.err


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "folder", "words", "sizes"),
    [
        ("gsm8k", "gsm8k", {}, (7473, 1319)),
        ("mbpp", "mbpp", {}, (371, 500)),
        ("anli", "anli", {"train": ["r1_dev", "r2_dev"], "test": ["r3_dev"]}, (2000, 1198)),
        ("math", "deepscaler_parts", {"test": ["test_amc"]}, (7470, 83)),
        ("deepscaler", "deepscaler_parts", {"train": ["train_math", "train_aime"]}, None),
        ("deepmath", "deepmath_sample", {}, None),
    ],
)
def test_real_files_prepare_whole_and_apart(
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
