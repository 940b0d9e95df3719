import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kapelle.errors import ConfigError
from kapelle.runs.trackers import (
    Guarded,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
    open_tracker,
)


def read_events(folder: Path) -> Any:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_shows_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tracker = open_tracker("tensorboard", tmp_path)
    tracker.log(1, {"reward/actor": 0.25, "samples": 256.0})
    tracker.log(2, {"reward/actor": 0.5})
    tracker.close()
    events = read_events(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("reward/actor")] == [(1, 0.25), (2, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("samples")] == [(1, 256.0)]


def test_a_resumed_run_hides_the_steps_that_it_repeats(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    for values, first_step in (({1: 0.1, 2: 0.2, 3: 0.3}, 0), ({2: 0.5, 3: 0.6}, 2)):
        tracker = TensorBoardTracker(tmp_path, first_step)
        for step, value in values.items():
            tracker.log(step, {"loss": value})
        tracker.close()
    events = read_events(tmp_path / "tensorboard")
    assert [(event.step, round(event.value, 3)) for event in events.Scalars("loss")] == [
        (1, 0.1),
        (2, 0.5),
        (3, 0.6),
    ]


class FakeRun:
    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, Any], int]] = []
        self.finished = False

    def log(self, row: dict[str, Any], step: int) -> None:
        self.rows.append((row, step))

    def finish(self) -> None:
        self.finished = True


class FakeWandb(ModuleType):
    """The part of wandb 0.31 that the tracker uses."""

    Error = type("Error", (Exception,), {})

    def __init__(self) -> None:
        super().__init__("wandb")
        self.asked: dict[str, Any] = {}
        self.run = FakeRun()
        self.refusal: Exception | None = None

    def init(self, **asked: Any) -> FakeRun:
        if self.refusal is not None:
            raise self.refusal
        self.asked = asked
        return self.run

    def Settings(self, **settings: Any) -> SimpleNamespace:  # noqa: N802 - wandb's name
        return SimpleNamespace(**settings)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


@pytest.mark.parametrize(("offline", "mode", "resume"), [(True, "offline", None), (False, "online", "allow")])
def test_wandb_runs_are_named_after_their_folder(
    tmp_path: Path, wandb: FakeWandb, offline: bool, mode: str, resume: str | None
) -> None:
    WandbTracker(tmp_path / "demo run", "team", offline=offline, config={"seed": 3})
    asked = wandb.asked
    assert (asked["project"], asked["name"], asked["id"]) == ("team", "demo run", "demo-run")
    assert (asked["mode"], asked["resume"], asked["dir"]) == (mode, resume, str(tmp_path / "demo run"))
    assert asked["config"] == {"seed": 3}
    assert asked["settings"].silent


def test_wandb_without_a_key_is_explained(tmp_path: Path, wandb: FakeWandb) -> None:
    wandb.refusal = wandb.Error("No API key configured.")
    with pytest.raises(
        ConfigError, match=r"No API key configured\. Set WANDB_API_KEY, or set `offline: true`"
    ):
        WandbTracker(tmp_path, "team", offline=False)


class Breaking(Tracker):
    """A tracker whose server is gone after its first step."""

    def __init__(self) -> None:
        self.new_messages: list[str] = []

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.new_messages.append(f"log {step}")
        if step > 1:
            raise ConnectionError("gone\naway")

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        self.new_messages.append("table")

    def close(self) -> None:
        self.new_messages.append("close")


def test_a_tracker_that_fails_is_reported_once() -> None:
    said: list[str] = []
    broken = Breaking()
    tracker = Guarded("mine", lambda: broken, said.append)
    for step in (1, 2, 3):
        tracker.log(step, {})
        tracker.table(step, "transcripts", [])
    tracker.close()
    assert broken.new_messages == ["log 1", "table", "log 2"]
    assert said == [
        "the tracker 'mine' has failed and is no longer used (ConnectionError: gone away); the run directory holds everything"
    ]


def test_a_table_in_tensorboard_is_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tracker = open_tracker("tensorboard", tmp_path)
    tracker.table(
        3, "transcripts", [{"agent": "solver", "text": "**42**"}, {"agent": "critic", "text": "<b>no"}]
    )
    tracker.close()
    (text,) = read_events(tmp_path / "tensorboard").Tensors("transcripts/text_summary")
    # Four spaces make Markdown show the line as code: a model's markup stays text.
    assert text.tensor_proto.string_val[0].splitlines() == [
        b"    agent: solver",
        b"    text: **42**",
        b"    ",
        b"    agent: critic",
        b"    text: <b>no",
    ]


class FakeMlflow(ModuleType):
    """The part of MLflow's client that the tracker uses."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.runs: dict[str, list[tuple[Any, ...]]] = {}
        self.places: list[str | None] = []

    def MlflowClient(self, tracking_uri: str | None) -> Any:  # noqa: N802 - MLflow's name
        self.places.append(tracking_uri)
        info = [SimpleNamespace(info=SimpleNamespace(run_id=name)) for name in self.runs]

        def create(_experiment: str, tags: dict[str, str]) -> Any:
            self.runs[tags["mlflow.runName"]] = []
            return SimpleNamespace(info=SimpleNamespace(run_id=tags["mlflow.runName"]))

        return SimpleNamespace(
            get_experiment_by_name=lambda _: SimpleNamespace(experiment_id="1"),
            search_runs=lambda _experiments, wanted: [r for r in info if f"'{r.info.run_id}'" in wanted],
            create_run=create,
            log_metric=lambda run, name, value, step: self.runs[run].append((name, value, step)),
            log_text=lambda run, text, file: self.runs[run].append((file, text)),
            set_terminated=lambda run: self.runs[run].append(("end",)),
        )


def test_mlflow_continues_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMlflow()
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for step in (1, 2):
        tracker = open_tracker("mlflow", tmp_path / "demo", project="team")
        tracker.log(step, {"reward/a@1": 0.5})
        tracker.close()
    assert fake.runs == {"demo": [("reward/a_1", 0.5, 1), ("end",), ("reward/a_1", 0.5, 2), ("end",)]}
    assert os.environ["MLFLOW_ALLOW_FILE_STORE"] == "true", "MLflow 3.17 refuses a folder without it"
    assert fake.places == [(tmp_path / "demo" / "mlflow").as_uri()] * 2
    open_tracker("mlflow", tmp_path / "demo", offline=False)
    assert fake.places[-1] is None


class FakeTrackio(ModuleType):
    """The part of trackio that the tracker uses."""

    def __init__(self) -> None:
        super().__init__("trackio")
        self.asked: dict[str, Any] = {}
        self.run = FakeRun()

    def init(self, **asked: Any) -> FakeRun:
        sys.stdout.write("a banner")
        self.asked = asked
        return self.run

    def Table(self, columns: list[str], data: list[list[str]]) -> list[dict[str, str]]:  # noqa: N802 - trackio's name
        return [dict(zip(columns, row, strict=True)) for row in data]


def test_trackio_logs_locally_without_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeTrackio()
    monkeypatch.setitem(sys.modules, "trackio", fake)
    tracker = open_tracker("trackio", tmp_path / "demo", project="team", config={"path": tmp_path})
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    assert (fake.asked["name"], fake.asked["space_id"], fake.asked["resume"]) == ("demo", None, "allow")
    assert fake.run.rows == [({"loss": 0.5}, 1)]
    assert fake.run.finished
    assert capsys.readouterr().out == ""
