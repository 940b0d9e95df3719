import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kapelle.errors import ConfigError
from kapelle.runs.trackers import TensorBoardTracker, WandbTracker, open_tracker


def read_events(folder: Path) -> Any:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def test_tensorboard_shows_what_was_logged(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    tracker = open_tracker("tensorboard", tmp_path)
    tracker.log(1, {"reward/actor": 0.25, "samples": 256.0})
    tracker.log(2, {"reward/actor": 0.5})
    tracker.text(2, "conversation", "**12+30**\n<b>42</b>")
    tracker.close()
    events = read_events(tmp_path / "tensorboard")
    assert [(event.step, event.value) for event in events.Scalars("reward/actor")] == [(1, 0.25), (2, 0.5)]
    assert [(event.step, event.value) for event in events.Scalars("samples")] == [(1, 256.0)]
    (text,) = events.Tensors("conversation/text_summary")
    # Four spaces make Markdown show the line as code: a model's markup stays text.
    assert text.tensor_proto.string_val == [b"    **12+30**\n    <b>42</b>\n"]


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

    def Html(self, data: str) -> str:  # noqa: N802 - wandb's name
        return f"Html({data})"


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def test_wandb_gets_metrics_and_escaped_texts(tmp_path: Path, wandb: FakeWandb) -> None:
    tracker = open_tracker("wandb", tmp_path / "demo run", project="team", config={"seed": 3})
    tracker.log(1, {"reward/actor": 0.25})
    tracker.text(1, "conversation", "<script>")
    assert wandb.run.rows == [
        ({"reward/actor": 0.25}, 1),
        ({"conversation": "Html(<pre>&lt;script&gt;</pre>)"}, 1),
    ]
    assert not wandb.run.finished
    tracker.close()
    assert wandb.run.finished


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
    with pytest.raises(ConfigError, match=r"No API key configured\. Set WANDB_API_KEY, or `offline: true`"):
        WandbTracker(tmp_path, "team", offline=False)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"pip install 'kapelle\[{name}\]'"):
        open_tracker(name, tmp_path)


def test_an_unknown_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Known: tensorboard, wandb"):
        open_tracker("mlflow", tmp_path)


def test_importing_trackers_imports_neither() -> None:
    code = "import sys, kapelle.runs.trackers; print({'torch', 'tensorboard', 'wandb'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
