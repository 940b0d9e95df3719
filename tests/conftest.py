"""What tests of several modules ask for."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from kapelle.environments.sandbox.bubblewrap import Bubblewrap

# Tensors here are tiny: a second thread costs more than it does, ten times more on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run, and no verdict from how busy the machine is.
settings.register_profile("kapelle", max_examples=50, deadline=None, derandomize=True, database=None)
settings.load_profile("kapelle")


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Let files be flushed when the kernel likes: only a loss of power would show a difference."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data files that KAPELLE_DATA names; skips where there is none."""
    named = os.environ.get("KAPELLE_DATA")
    if not named:
        pytest.skip(
            "KAPELLE_DATA is not set; it names the folder that holds gsm8k/, mbpp/ and other real data"
        )
    folder = Path(named)
    if not folder.is_dir():
        pytest.skip(f"KAPELLE_DATA names the folder {folder}, which does not exist")
    return folder


@pytest.fixture(scope="session")
def gsm8k_folder(data_folder: Path) -> Path:
    """The folder of GSM8K's files; skips where it is missing."""
    folder = data_folder / "gsm8k"
    if not (folder / "train.jsonl.gz").is_file():
        pytest.skip(f"the folder {folder} holds no train.jsonl.gz (GSM8K)")
    return folder


@pytest.fixture(scope="session")
def sandbox() -> Bubblewrap:
    """The default sandbox; skips, with the reason, where this machine cannot give it."""
    backend = Bubblewrap()
    missing = [layer for layer in backend.layers() if layer.required and not layer.present]
    if missing:
        pytest.skip(f"no sandbox here: {missing[0].detail}")
    return backend


@pytest.fixture(scope="session")
def mbpp_rows(data_folder: Path) -> list[dict[str, Any]]:
    """All 974 problems of MBPP with their reference solutions; skips where they are missing."""
    file = data_folder / "mbpp" / "mbpp.jsonl.gz"
    if not file.is_file():
        pytest.skip(f"the folder {file.parent} holds no mbpp.jsonl.gz")
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder as a pretrained model is one: Qwen3, with a tokeniser, a chat template and a long context of its own."""
    from tests.support.tiny import SIZE

    from kapelle.models.language_model import load_language_model
    from kapelle.models.weights import save_model
    from kapelle.settings.schema import EmbeddedConfig, ModelConfig

    folder = tmp_path_factory.mktemp("models") / "pretrained"
    save_model(
        folder, load_language_model(ModelConfig(embedded=EmbeddedConfig(**{**SIZE, "context": 32768})))
    )
    return str(folder)


def pytest_runtest_teardown() -> None:
    """End threads that a test has left spinning."""
    if (stuck := sys.modules.get("tests.support.stuck")) is not None:
        stuck.release()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `long` what `sample(n)` leaves to `make test-long`: all but every n-th case of a test."""
    cases = Counter[str]()
    for item in items:
        if (sample := item.get_closest_marker("sample")) is not None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % sample.args[0]:
                item.add_marker("long")
            cases[test] += 1


def pytest_collection_finish() -> None:
    """Let the collector look no more at the thousands of tests: it took a sixth of their time to find none to throw away."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Processes of `-n auto`: one more than cores, and no more than eight, since each holds all that a run imports.

    A quarter of the suite's time passes in waiting: for deadlines, signals and processes. The one more uses it.
    """
    return min((os.cpu_count() or 1) + 1, 8)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds between attempts, which do not pass; those of other threads, such as a server's, do."""
    slept: list[float] = []
    real, mine = asyncio.sleep, threading.get_ident()

    async def sleep(seconds: float) -> None:
        if threading.get_ident() == mine:
            slept.append(seconds)
        else:
            await real(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return slept
