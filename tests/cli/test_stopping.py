"""After Ctrl-C or SIGTERM at any moment, a resumed run equals an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import TINY, Kapelle, Said

from kapelle.cli import running
from kapelle.runs.reader import read_evaluations, read_metrics, read_status
from kapelle.training.console import Watch

FRESH = "warmup.demonstrations=9"
"""A warm-up that no other test has cached."""


def raising(number: signal.Signals, when: Callable[[str, int], bool]) -> type[Watch]:
    """A watch that sends this process a signal, once, at an event of a step."""

    class Signalling(Watch):
        sent = False

        def send(self, event: str, step: int) -> None:
            if when(event, step) and not Signalling.sent:
                Signalling.sent = True
                signal.raise_signal(number)

        def phase(self, name: str, detail: str) -> None:
            super().phase(name, detail)
            self.send(name, self.now.step)

        def warmup(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
            super().warmup(step, steps, metrics)
            self.send("warmup", step)

        def step(self, step: Any, steps: int) -> None:
            super().step(step, steps)
            self.send("step", step.number)

    return Signalling


def without_time(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_a_signal_in_training_saves_and_prints_how_to_resume(
    kapelle: Kapelle,
    monkeypatch: pytest.MonkeyPatch,
    finished: tuple[Path, Said],
    number: signal.Signals,
    code: int,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(running, "Watch", raising(number, lambda event, step: (event, step) == ("step", 1)))
        said = kapelle("demo", *TINY, "checkpoint.every=10", "--run-dir", "run")
    assert said.code == code
    assert said.out.splitlines()[-1] == "stopped; nothing is lost. Continue with: kapelle train --resume run"
    assert read_status(Path("run")).state == "interrupted"

    resumed = kapelle("train", "--resume", "run", "--json")
    assert resumed.code == 0, resumed.err
    whole, said_whole = finished
    assert without_time(read_metrics(Path("run"))) == without_time(read_metrics(whole))
    assert [row["step"] for row in read_evaluations(Path("run"))] == [0, 2]
    same = ("accuracy_before", "accuracy_after", "interval", "steps", "problems")
    assert {k: resumed.json[k] for k in same} == {k: said_whole.json[k] for k in same}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "event"),
    [(signal.SIGTERM, 143, "warmup"), (signal.SIGINT, 130, "evaluation")],
)
def test_a_signal_before_training_leaves_a_run_that_starts_at_0(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int, event: str
) -> None:
    monkeypatch.setenv("KAPELLE_CACHE", "cache")
    with monkeypatch.context() as patched:
        patched.setattr(running, "Watch", raising(number, lambda name, _step: name == event))
        said = kapelle("demo", *TINY, FRESH, "--run-dir", "run", "--json")
    assert said.code == code
    row = said.json
    assert (row["accuracy_after"], row["steps"], row["stopped_by"]) == (None, 0, code)
    last = said.err.splitlines()[-1]
    assert last.endswith("kapelle train --resume run")
    assert ("the warm-up starts over" in last) == (event == "warmup")
    assert not list(Path("cache").rglob(".*")), "no half a model is left in the cache"
    assert kapelle("train", "--resume", "run").code == 0
    assert read_status(Path("run")).state == "finished"


@pytest.mark.slow
def test_a_signal_in_the_last_evaluation_loses_no_step(
    kapelle: Kapelle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        at_the_end = raising(signal.SIGINT, lambda event, step: (event, step) == ("evaluation", 2))
        patched.setattr(running, "Watch", at_the_end)
        stopped = kapelle("demo", *TINY, "--run-dir", "run", "--json")
    assert (stopped.code, stopped.json["steps"], stopped.json["accuracy_after"]) == (130, 2, None)
    resumed = kapelle("train", "--resume", "run", "--json")
    assert resumed.code == 0
    assert resumed.json["accuracy_after"] is not None
    assert len(read_metrics(Path("run"))) == 2
    assert [path.name for path in sorted(Path("run/checkpoints").iterdir())] == ["00000001", "00000002"]


PROGRAM = """
import importlib, signal, sys
signal.signal(signal.SIGINT, {handler})
sys.argv = [{called!r}, "runs", "ls"]
sys.orig_argv = ["python", "-m", "kapelle", "runs", "ls"]
import kapelle
if {early}:
    signal.raise_signal(signal.SIGINT)
from kapelle.cli import main
importlib.import_module("kapelle.cli.runs").run = lambda _: signal.raise_signal(signal.SIGINT) or 0
sys.exit(main())
"""


@pytest.mark.parametrize("handler", ["signal.default_int_handler", "signal.SIG_IGN"])
def test_ctrl_c_is_one_line_however_the_process_was_started(handler: str) -> None:
    # A shell starts background jobs with SIGINT ignored; who sends it to a command of ours means it all the same.
    program = PROGRAM.format(handler=handler, early=False, called="/somewhere/kapelle")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "kapelle: stopped.\n")


@pytest.mark.parametrize("called", ["/somewhere/kapelle", "-m"])
def test_ctrl_c_while_the_command_is_imported_is_one_line_too(called: str) -> None:
    program = PROGRAM.format(handler="signal.default_int_handler", early=True, called=called)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "kapelle: stopped.\n")


@pytest.mark.sample(2)
@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGHUP", 129)])
def test_a_stop_while_torch_is_imported_is_one_line(tmp_path: Path, number: str, code: int) -> None:
    # As an exception it would come out of torch's C++ as an abort, and of others as a NameError.
    (tmp_path / "torch.py").write_text(
        f"import signal, sys\ntry:\n    signal.raise_signal(signal.{number})\nexcept BaseException:\n    print('raised', file=sys.stderr)"
    )
    (tmp_path / "starts.py").write_text(  # under `nohup`, where SIGHUP is ignored, it would stay so
        "import runpy, signal\nsignal.signal(signal.SIGHUP, signal.SIG_DFL)\nrunpy.run_module('kapelle', run_name='__main__')"
    )
    words = [sys.executable, str(tmp_path / "starts.py"), "train", "demo"]
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ended = subprocess.run(words, capture_output=True, text=True, check=False, env=environ)
    assert (ended.returncode, ended.stderr) == (code, "kapelle: stopped.\n")
