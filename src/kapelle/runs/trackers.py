"""Sends metrics to trackers in addition to the run directory.

The trackers are TensorBoard, Weights & Biases, MLflow and trackio, each of which is an optional extra. The run
directory always contains all data, and a tracker is a second view of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from kapelle.errors import AbsentPackage, ConfigError, noting
from kapelle.runs.reader import saved_steps
from kapelle.settings.checks import RunToCheck
from kapelle.types import Group


class Tracker:
    """A destination for metrics in addition to the run directory. This base class does not store anything."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record rows of strings with the same columns, such as transcripts. The rows are shown as plain text."""

    def close(self) -> None:
        """Write pending data and close the tracker."""


class TensorBoardTracker(Tracker):
    """Writes event files for TensorBoard to `<run>/tensorboard`.

    The argument `first_step` is the first step that will be logged. After a resume, TensorBoard hides the steps from
    `first_step` on that an earlier process has logged. Raises ConfigError if tensorboard is not installed.
    """

    def __init__(self, run: Path, first_step: int = 0) -> None:
        require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Write a table as text, because TensorBoard does not support tables.

        The text is indented, because TensorBoard renders Markdown and shows indented text as code.
        """
        text = "\n\n".join("\n".join(f"{k}: {v}" for k, v in row.items()) for row in rows)
        self._writer.add_text(name, "".join(f"    {line}\n" for line in text.splitlines()), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class _Sending(Tracker):
    """A tracker with the interface that is common to Weights & Biases and trackio."""

    _library: Any
    _run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Send a table, whose cells are shown as text."""
        self._run.log({name: self._library.Table(**_split(rows))}, step=step)

    def close(self) -> None:
        """Send pending data and close the tracker."""
        with redirect_stdout(sys.stderr):  # standard output is reserved for the panel or for --json
            self._run.finish()


class WandbTracker(_Sending):
    """Sends metrics to Weights & Biases or, with `offline`, writes them to `<run>/wandb` for `wandb sync`.

    A resumed run continues the same Weights & Biases run, whose name and id are the name of the folder. Raises
    ConfigError if wandb is not installed or does not start.
    """

    def __init__(
        self, run: Path, project: str, *, offline: bool, config: Mapping[str, Any] | None = None
    ) -> None:
        self._library = require("wandb")
        name = run.resolve().name
        try:
            self._run = self._library.init(
                project=project,
                name=name,
                id=re.sub(r"[^A-Za-z0-9_-]", "-", name),
                resume=None if offline else "allow",
                dir=str(run),
                mode="offline" if offline else "online",
                config=dict(config or {}),
                # Standard output is reserved for the panel or for --json.
                settings=self._library.Settings(silent=True, console="off"),
            )
        except self._library.Error as error:
            raise ConfigError(
                f"Weights & Biases does not start: {str(error).rstrip('.')}. Set WANDB_API_KEY, or "
                "set `offline: true` for this tracker."
            ) from error


def _split(rows: Sequence[Mapping[str, str]]) -> dict[str, list[Any]]:
    """Return the columns and the data of a table."""
    columns = list(rows[0]) if rows else []
    return {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}


class Guarded(Tracker):
    """A wrapper that prevents a tracker from stopping the run. The first failure is reported, and the tracker is disabled."""

    def __init__(self, name: str, begin: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        """Start the tracker. The function `say` reports a failure. Raises ConfigError for invalid settings."""
        self._name, self._say = name, say
        self._tracker: Tracker | None = None
        try:
            self._tracker = begin()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - an unreachable server must not stop a run
            self._end(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._try(lambda tracker: tracker.log(step, metrics))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record rows of strings."""
        self._try(lambda tracker: tracker.table(step, name, rows))

    def close(self) -> None:
        """Write pending data and close the tracker."""
        self._try(lambda tracker: tracker.close())

    def _try(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:  # noqa: BLE001 - the run directory holds everything
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Disable a tracker that has failed, and report the failure."""
        self._tracker = None
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._say(
            f"the tracker '{self._name}' has failed and is no longer used ({reason}); the run "
            "directory holds everything"
        )


def open_trackers(
    settings: Sequence[Any], run: Path, config: Mapping[str, Any], say: Callable[[str], None] = lambda _: None
) -> list[Tracker]:
    """Open the trackers in the settings of a run (`TrackerConfig`) with `open_tracker`. If ConfigError is raised, all trackers are closed.

    If a tracker fails, even while it is opened, `say` reports the failure once, the tracker is disabled, and the run
    continues.
    """
    saved = saved_steps(run)
    first = saved + 1 if saved else 0
    opened: list[Tracker] = []
    with ExitStack() as on_error:
        for t in settings:
            begin = partial(
                open_tracker,
                t.name,
                run,
                project=t.project,
                offline=t.offline,
                first_step=first,
                config=config,
            )
            opened.append(Guarded(t.name, begin, say))
            on_error.callback(opened[-1].close)
        on_error.pop_all()
    return opened


def open_tracker(
    name: str,
    run: Path,
    *,
    project: str = "kapelle",
    offline: bool = True,
    first_step: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Tracker:
    """Open the tracker with the given name. Raises ConfigError if the tracker is not installed."""
    if name == "tensorboard":
        return TensorBoardTracker(run, first_step)
    if name == "wandb":
        return WandbTracker(run, project, offline=offline, config=config)
    if name == "mlflow":
        return Mlflow(require(name), run, project, offline=offline, config=config)
    if name == "trackio":
        return Trackio(require(name), run, project, offline=offline, config=config)
    raise ConfigError(f"Unknown tracker '{name}'. Known: mlflow, tensorboard, trackio, wandb.")


def check_trackers(run: RunToCheck) -> None:
    """Raise AbsentPackage for a tracker of the run that is not installed. Nothing is imported."""
    for tracker in run.config.trackers if not run.elsewhere else ():
        with noting(run.absent):
            if importlib.util.find_spec(tracker.name) is None:
                raise _missing(tracker.name)


def require(module: str) -> Any:
    """Import a module. Raises ConfigError, which names the extra that contains the module, if the module is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module) from error


def _missing(name: str) -> AbsentPackage:
    return AbsentPackage(
        f"The tracker '{name}' is not installed. Install it with: pip install 'kapelle[{name}]'"
    )


RUN = "kapelle.run"
"""The name of the tag by which a resumed run finds its earlier MLflow run."""
_ODD = re.compile(r"[^A-Za-z0-9_\-. /]")


class Mlflow(Tracker):
    """Logs metrics to MLflow. With `offline`, metrics are written to `<run>/mlflow`, otherwise to the server in MLFLOW_TRACKING_URI.

    A resumed run continues the MLflow run whose tag is the name of the folder.
    """

    def __init__(
        self, mlflow: Any, run: Path, project: str, *, offline: bool, config: Mapping[str, Any] | None = None
    ) -> None:
        name = run.resolve().name
        place = None
        if offline:
            place = (run.resolve() / "mlflow").as_uri()
            # The package mlflow-skinny has no database, and newer versions need this setting to use a folder.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = mlflow.MlflowClient(tracking_uri=place)
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        known = self._client.search_runs([experiment], f"tags.`{RUN}` = '{name.replace(chr(39), chr(95))}'")
        if known:
            self._id = known[0].info.run_id
            return
        tags = {RUN: name.replace("'", "_"), "mlflow.runName": name}
        self._id = self._client.create_run(experiment, tags=tags).info.run_id
        if config is not None:
            self._client.log_text(self._id, json.dumps(config, indent=1, default=str), "config.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step. Characters that MLflow does not allow in names are replaced by `_`."""
        for name, value in metrics.items():
            self._client.log_metric(self._id, _ODD.sub("_", name), float(value), step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record a table as JSON in the `split` format of pandas, which MLflow shows as a table."""
        self._client.log_text(self._id, json.dumps(_split(rows)), f"{_ODD.sub('_', name)}/{step:08d}.json")

    def close(self) -> None:
        """End the MLflow run. A resumed run reopens it."""
        self._client.set_terminated(self._id)


class Trackio(_Sending):
    """Logs metrics to a Space with the name of the project or, with `offline`, to trackio's store on this machine (TRACKIO_DIR).

    A resumed run continues the trackio run with the name of its folder.
    """

    def __init__(
        self, trackio: Any, run: Path, project: str, *, offline: bool, config: Mapping[str, Any] | None = None
    ) -> None:
        self._library = trackio
        with redirect_stdout(sys.stderr):  # standard output is reserved for the panel or for --json
            self._run = trackio.init(
                project=project,
                name=run.resolve().name,
                config=json.loads(json.dumps(dict(config or {}), default=str)),
                space_id=None if offline else project,
                resume="allow",
                embed=False,
            )


# -------- Transcripts: a few episodes of a step as a table of texts.

EPISODES = 4
"""The number of groups in the table of a step. Each group is represented by its first episode."""
CHARACTERS = 2000
"""The maximum number of characters of a text. The table shows how many characters were removed."""


def transcripts(groups: Sequence[Group]) -> list[dict[str, str]]:
    """Return a row for each turn of a few episodes, with the task, the agent, the text, the reward, and how the episode ended."""
    chosen = [group.episodes[0] for group in groups if group.episodes][:EPISODES]
    return [
        {
            "task": _short(episode.task.question or episode.task.id),
            "agent": turn.agent,
            "text": _short(turn.text),
            "reward": f"{episode.rewards.get(turn.agent, 0.0):.4g}",
            "ended": _short(episode.error) if episode.error else ("cut" if episode.truncated else "whole"),
        }
        for episode in chosen
        for turn in episode.turns
    ]


def _short(text: str) -> str:
    left = len(text) - CHARACTERS
    return text if left <= 0 else f"{text[:CHARACTERS]} … and {left} more characters"
