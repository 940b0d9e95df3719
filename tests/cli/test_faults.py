"""After damage to files a command either continues or ends with one line: what is wrong, where, and how to repair it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle, Said
from tests.cli.damage import Damage, bytes_in, cut, folder_at, gone, one_line
from tests.support.run_folders import files

from kapelle.errors import DataError, RunDirectoryError
from kapelle.runs.reader import read_episodes, read_groups
from kapelle.runs.step_rows import pack

RESUME = ("train", "--resume", "run", "training.steps=3")
CONTINUES = 0
ENDS = 2


def half_a_row() -> None:
    with Path("run/metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "lo')


NESTED = b"[" * 100_000

# What is damaged → (the damage, the command, its exit code, a part of its output).
CASES: dict[str, tuple[Damage, tuple[str, ...], int, str]] = {
    # Files that only describe the run: the command writes them again.
    "provenance.json, half": (cut("run/provenance.json"), RESUME, CONTINUES, "provenance.json is damaged"),
    "provenance.json, nested": (bytes_in("run/provenance.json", NESTED), RESUME, CONTINUES, "provenance.json is damaged"),
    "status.json, garbage": (bytes_in("run/status.json", b"\0\xff"), RESUME, CONTINUES, "kapelle train --resume run"),
    "latest, garbage": (bytes_in("run/latest", b"\0\xff"), RESUME, CONTINUES, "kapelle train --resume run"),
    # A step with half a row runs again, from the newest complete checkpoint.
    "metrics.jsonl, half a row behind": (half_a_row, RESUME, CONTINUES, ""),
    "a checkpoint, cut": (cut("run/checkpoints/00000002/train.safetensors"), RESUME, CONTINUES, "skipped a checkpoint"),
    "a checkpoint's state, a folder": (folder_at("run/checkpoints/00000002/state.json"), RESUME, CONTINUES, "skipped a checkpoint"),
    # Files that define the run.
    "config.yaml, no UTF-8": (bytes_in("run/config.yaml", b"name: \xff"), RESUME, ENDS, "config.yaml is damaged: it is not UTF-8 text"),
    "config.yaml, nested": (bytes_in("run/config.yaml", NESTED), RESUME, ENDS, "nested too deeply"),
    "config.yaml, a folder": (folder_at("run/config.yaml"), RESUME, ENDS, "no kapelle run at run"),
    "config.yaml, missing": (gone("run/config.yaml"), ("train", "demo", *TINY, "--run-dir", "run"), ENDS, "and no config.yaml. Put that back"),
    "metrics.jsonl, cut": (bytes_in("run/metrics.jsonl", b""), RESUME, ENDS, "metrics.jsonl has lost rows"),
    "a recipe, no UTF-8": (bytes_in("mine.yaml", b"name: caf\xe9"), ("train", "mine.yaml"), ENDS, "mine.yaml is not UTF-8 text: unexpected end of data at byte 9"),
    "a recipe, nested": (bytes_in("mine.yaml", NESTED), ("validate", "mine.yaml"), ENDS, "nested too deeply"),
}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
def test_damaged_files_end_in_one_line_or_are_repaired(kapelle: Kapelle, run: Path, what: str) -> None:
    damage, words, code, expected = CASES[what]
    damage()
    said = kapelle(*words)
    assert said.code == code, said
    assert expected in (said.err if code else said.out), said
    if code:
        assert one_line(said)
    else:
        lines = Path("run/metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
        assert json.loads(Path("run/provenance.json").read_bytes())["training.steps"] == "command line"


@pytest.mark.parametrize("row", [b"{}", b'{"group": 0}', b"\xff", b"5", b'"text"', NESTED, b""])
def test_a_damaged_episode_is_named(run: Path, row: bytes) -> None:
    file = run / "episodes" / "train" / "00000001.jsonl.zst"
    file.write_bytes(pack(1, [row + b"\n"]))
    (run / "recorded.jsonl").unlink()
    for read in (lambda: read_groups(run, 1), lambda: list(read_episodes(run, 1))):
        with pytest.raises(DataError, match=re.escape(str(file))):
            read()
    file.unlink()
    file.mkdir()
    with pytest.raises(RunDirectoryError, match=re.escape(f"Cannot read {file}: it is not a regular file")):
        read_groups(run, 1)


class Failing(io.FileIO):
    """A file that opens, but every read of it fails."""

    def readinto(self, _buffer: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.name))

    def readall(self) -> bytes:
        return bytes(self.readinto(None))


@contextmanager
def failing_reads(
    monkeypatch: pytest.MonkeyPatch, folder: Path, number: int, how: str
) -> Iterator[list[str]]:
    """Make one read of a file below a folder fail, on opening or on reading; yields the paths of all reads."""
    real, paths = io.open, []

    def opened(file: object, mode: str = "r", *arguments: object, **options: object) -> object:
        path = os.path.abspath(file) if isinstance(file, str | os.PathLike) else ""  # noqa: PTH100 (also no path)
        if not path.startswith(str(folder)) or set(mode) & set("wax+"):
            return real(file, mode, *arguments, **options)  # type: ignore[call-overload]
        paths.append(path)
        if len(paths) - 1 != number:
            return real(file, mode, *arguments, **options)  # type: ignore[call-overload]
        if how == "opened":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        raw = Failing(path)
        if "b" in mode:
            return raw if arguments and arguments[0] == 0 else io.BufferedReader(raw)
        return io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8")

    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", opened)
        patched.setattr("io.open", opened)
        yield paths


def kept(run: Path) -> dict[str, bytes]:
    """Return the files that decide how a run resumes."""
    return {name: data for name, data in files(run).items() if name != "provenance.json"}


@pytest.mark.long
@pytest.mark.parametrize("how", ["opened", "read"])
def test_a_failing_disk_ends_a_resume_with_one_line_or_is_tolerated(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, finished: tuple[Path, Said], tmp_path: Path, how: str
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(os.environ["KAPELLE_CACHE"], cache)
    monkeypatch.setenv("KAPELLE_CACHE", str(cache))
    number, total, resumed = -1, 0, list[dict[str, bytes]]()
    while number < total:
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree(finished[0], "run")
        with failing_reads(monkeypatch, tmp_path, number, how) as paths:
            said = kapelle("train", "--resume", "run")  # the run is complete: every read happens here
        total = total or len(paths)
        place = paths[number] if number >= 0 else "nowhere"
        if said.code:
            assert said.code == ENDS, (place, said)
            assert one_line(said), (place, said)
            assert re.search("EIO|Input/output error", said.err), (place, said)
            left = kept(Path("run"))
            if left not in resumed:  # equal folders resume equally
                assert kapelle("train", "--resume", "run").code == 0, place
                resumed.append(left)
        number += 1
    assert total > 20
    assert resumed
