"""The command line in this process, on a team that trains in a moment."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kapelle.cli import main
from kapelle.environments.data import source as data_source

TINY = (
    "model.embedded.hidden=16",
    "model.embedded.layers=1",
    "model.embedded.heads=2",
    "model.embedded.kv_heads=1",
    "model.embedded.intermediate=32",
    "model.embedded.context=64",
    "team.lora.rank=2",
    "warmup.steps=1",
    "warmup.demonstrations=8",
    "warmup.batch=4",
    "training.steps=2",
    "training.tasks_per_step=2",
    "algorithm.group_size=2",
    "evaluation.problems=4",
    "evaluation.every=0",
    "checkpoint.every=1",
)
"""Settings that make the recipe `demo` small."""


@dataclass(frozen=True)
class Said:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Kapelle = Callable[..., Said]


def call(*words: str) -> Said:
    """Run a command in this process; its output is piped, not a terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(word) for word in words])
    return Said(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep warmed-up models of these tests to themselves, and what commands set to this session."""
    before = dict(os.environ)
    os.environ["KAPELLE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def kapelle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kapelle:
    """Call the command line from an empty folder, as a process that has read no data yet."""
    monkeypatch.chdir(tmp_path)
    data_source.raw_rows.cache_clear()  # other tests have folders of the same name below their own
    return call


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make loading or warming up a model an error of the test."""

    def refuse(*_arguments: object, **_options: object) -> None:
        raise AssertionError("a model is loaded")

    for (
        place
    ) in (  # who imports a name before whom it comes from: what is imported here first must find the real one
        "features.warmup.stage.load_models",
        "training.starting.bases_of",
        "setup.model_loading.load_models",
        "setup.model_loading.load_language_model",
    ):
        monkeypatch.setattr(f"kapelle.{place}", refuse)


@pytest.fixture
def run(kapelle: Kapelle, finished: tuple[Path, Said]) -> Path:
    """A copy of the finished run, to continue with or to damage, as `run` in the folder of the test."""
    return Path(shutil.copytree(finished[0], "run"))


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Said]:
    """A run of the tiny demo and what the command said, with `--json`."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    said = call("demo", *TINY, "--run-dir", str(folder), "--json")
    assert said.code == 0, said.err
    return folder, said
