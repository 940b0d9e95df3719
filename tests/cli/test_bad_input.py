"""Mistakes of newcomers end with one line and exit code 2 before a model loads."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import TINY, Kapelle

from kapelle.models.embedded import build_tokenizer
from kapelle.runs.checkpoint import newest_valid
from kapelle.runs.lock import RunLock

Prepare = Callable[[], None]


def corrupt_data() -> None:
    rows = [json.dumps({"question": f"{k}+1?", "answer": f"#### {k + 1}"}) for k in range(5)]
    Path("data").mkdir()
    for name in ("train", "test"):
        lines = rows if name == "test" else [*rows[:2], '{"question": "half a li', *rows[3:]]
        Path(f"data/{name}.jsonl").write_text("\n".join(lines) + "\n")


def model_without_weights() -> None:
    build_tokenizer(64).save_pretrained("model")
    Path("model/config.json").write_text('{"model_type": "qwen3"}')


def nothing() -> None:
    """Prepare nothing."""


MATH = ("gsm8k", "environment.path=data")

CASES: dict[str, tuple[Prepare, tuple[str, ...], str]] = {
    "missing data": (nothing, ("gsm8k", "environment.path=no/such/folder"), "no/such/folder"),
    "corrupt data": (corrupt_data, MATH, "train.jsonl, line 3"),
    "model that is not there": (nothing, ("demo", "model.path=./model"), "'./model'"),
    "past of no run": (nothing, ("demo", "warmup=null", "team.agents.1.weights={past: runs/none@2}"), "runs/none@2"),
    "model without weights": (model_without_weights, ("demo", "model.path=./model"), "no weights"),
    "unknown recipe": (nothing, ("gsm8k_step",), "Did you mean 'gsm8k_steps'?"),
    "unknown agent in a prompt": (nothing, ("demo", "team.agents.1.prompt='{reasoning}'"), "{reasoning}"),
    "algorithm for one policy": (nothing, ("demo", "algorithm.name=ppo"), "algorithm.name: ippo"),
    "nothing to train": (nothing, ("demo", "team.sharing=frozen"), "team.sharing"),
    "adapter without a place": (nothing, ("demo", "team.lora.targets=[q_prj]"), "Did you mean 'q_proj'?"),
    "prompt beyond the context": (nothing, ("demo", "model.embedded.context=16", "team.agents.0.system=You are a careful helper."), "agent 'reasoner'"),
    "unknown key": (nothing, ("demo", "training.stpes=3"), "Did you mean 'steps'?"),
    "impossible value": (nothing, ("demo", "training.steps=many"), "command line"),
    "unknown environment": (nothing, ("demo", "environment.name=aritmetic"), "Did you mean 'arithmetic'?"),
    "tracker that is not installed": (nothing, ("demo", "trackers=[{name: wandb}]"), "pip install 'kapelle[wandb]'"),
}  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("command", ["train", "validate"])
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_ends_with_one_line_and_exit_code_2_before_a_model_loads(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, case: str, command: str
) -> None:
    import importlib.util

    there = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "wandb" else there(name))
    prepare, words, problem = CASES[case]
    prepare()
    small = [word for word in TINY if not word.startswith(("algorithm.", "model.embedded.context"))]
    recipe, *settings = words
    said = kapelle(command, recipe, *(small if recipe == "demo" else []), *settings)
    assert said.code == 2
    assert said.err.startswith("kapelle: ")
    assert problem in said.err
    assert said.err.count("\n") == 1, "one line"
    assert not Path("runs").exists(), "a run that cannot begin leaves no folder"


def test_two_trainers_never_share_a_run_directory(kapelle: Kapelle, run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != "lock"}
    lock = RunLock(run / "lock")
    said = kapelle("train", "--resume", "run", "training.steps=4")
    lock.release()
    assert said.code == 2
    assert said.err.startswith(f"kapelle: run is in use by process {os.getpid()}")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.usefixtures("run")
def test_a_run_is_never_written_over(kapelle: Kapelle) -> None:
    said = kapelle("demo", *TINY, "--run-dir", "run")
    assert said.code == 2
    assert "--resume" in said.err


def full_after(bytes_left: int) -> Callable[[int, bytes], int]:
    """An `os.write` for a disk that has so many bytes left."""
    real = os.write
    left = [bytes_left]

    def write(descriptor: int, data: bytes) -> int:
        if len(data) > left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        left[0] -= len(data)
        return real(descriptor, data)

    return write


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("bytes_left", [0, 12_000])
def test_a_full_disk_ends_a_run_with_one_line_and_all_that_was_saved(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, run: Path, bytes_left: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("kapelle.runtime.files.os.write", full_after(bytes_left))
        said = kapelle("train", "--resume", "run", "training.steps=4")
    assert said.code == 2
    assert "the disk is full" in said.err
    assert said.err.count("\n") == 1
    newest = newest_valid(run / "checkpoints")
    assert newest.folder is not None
    assert newest.rejected == ()
    resumed = kapelle("train", "--resume", "run", "training.steps=4", "--json")
    assert resumed.code == 0, resumed.err
    assert resumed.json["steps"] == 4
