"""What a run was started with is recorded, and what is another thing at a resume is said in one line each."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.observers import Reported
from tests.support.tiny import sections

from kapelle import Trainer
from kapelle.environments.data import source as data_source
from kapelle.models.checksums import base_of, write_checksums
from kapelle.runs.reader import read_provenance, read_starts
from kapelle.runtime.row_files import read_rows


def write(file: Path, count: int) -> None:
    rows = ({"question": f"{file.stem}: {k} + {k}?", "answer": str(2 * k)} for k in range(count))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data"
    folder.mkdir()
    write(folder / "train.jsonl", 8)
    write(folder / "test.jsonl", 3)
    (folder / "other.jsonl").write_text("nobody reads this")
    data_source.raw_rows.cache_clear()
    yield folder
    data_source.raw_rows.cache_clear()


def settings(data: Path, **over: Any) -> dict[str, Any]:
    return sections(
        environment={"name": "math", "path": str(data)},
        workflow={"name": "parallel"},
        team={"agents": 2, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 2}},
        **over,
    )


def train(run: Path, given: dict[str, Any], *, resume: bool = False, steps: int = 1) -> list[str]:
    """Take steps in a run, as a process that has read nothing yet; return what was said of the resume."""
    data_source.raw_rows.cache_clear()
    new_messages = Reported("resume")
    with Trainer(**given, run_dir=run, resume=resume, observer=new_messages) as trainer:
        trainer.train(steps)
    return new_messages.said


def test_a_resume_with_the_same_things_says_nothing_and_is_recorded(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, settings(data)) == []
    assert train(run, settings(data), resume=True) == []
    first, second = read_starts(run)
    assert (first["steps"], second["steps"]) == (0, 1)
    assert first["data"] == {str(data / name): sha256(data / name) for name in ("train.jsonl", "test.jsonl")}
    assert first["machine"]["threads"] == torch.get_num_threads()
    assert first["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert {"kapelle", "transformers", "python"} <= first["versions"].keys()
    assert {k: v for k, v in first.items() if k not in ("at", "steps")} == {
        k: v for k, v in second.items() if k not in ("at", "steps")
    }
    assert "starts" not in read_provenance(run)


@pytest.mark.slow
def test_other_data_are_said_with_what_they_were_are_and_what_follows(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, settings(data), steps=2)
    before = sha256(data / "train.jsonl")
    write(data / "train.jsonl", 2)  # fewer than there were: what is drawn follows from the step alone
    now = sha256(data / "train.jsonl")
    (said,) = train(run, settings(data), resume=True)
    assert f"train.jsonl was content {before[:12]}, is content {now[:12]}: " in said
    assert "changed data" in said
    assert [start["data"][str(data / "train.jsonl")] for start in read_starts(run)] == [before, now]
    assert train(run, settings(data), resume=True) == []  # the last start counts


def test_another_past_adapter_is_said(tmp_path: Path) -> None:
    team = {"agents": [{"name": "first"}, {"name": "second"}], "sampling": {"max_tokens": 2}}
    with Trainer(**sections(team=team)) as trainer:
        trainer.save_policies(tmp_path)
    past = tmp_path / "policies" / "second"
    agents = [{"name": "first"}, {"name": "second", "weights": {"past": str(past)}}]
    against = sections(team={"agents": agents, "sampling": {"max_tokens": 2}}, workflow={"name": "parallel"})
    run = tmp_path / "run"
    assert train(run, against) == []
    file = past / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    write_checksums(past, base_of(past))  # another adapter, and whole
    (said,) = train(run, against, resume=True)
    assert said.startswith(f"past adapter 'second' ({past}) was content ")
    assert "changed weights" in said


class TestContents:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz", "a.parquet"])
    def test_what_was_read_is_hashed_as_it_lies_there(self, tmp_path: Path, name: str) -> None:
        rows = [{"question": "é" * 1000, "answer": str(k)} for k in range(2000)]
        lines = "jsonl" in name
        text = "".join(json.dumps(r) + "\n" for r in rows) if lines else json.dumps(rows)
        file = tmp_path / name
        if name.endswith("parquet"):
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        else:
            file.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
        found: dict[str, str] = {}
        assert len(read_rows(file, found)) == 2000
        assert found == {str(file): sha256(file)}
