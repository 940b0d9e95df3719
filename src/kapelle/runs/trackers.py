"""Trackers beside the run directory: TensorBoard, Weights & Biases, MLflow and trackio, each an optional extra.

The run directory always holds everything; a tracker is a second place to look at it.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kapelle.errors import ConfigError
from kapelle.runs.reader import saved_steps


class Tracker(Protocol):
    """A further place for metrics besides the run directory."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text, such as a conversation; it is shown as it is, never as markup."""
        ...

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record rows of text with the same columns, such as who said what."""
        ...

    def close(self) -> None:
        """Write what is pending and end."""
        ...


class TensorBoardTracker:
    """Writes event files for TensorBoard into `<run>/tensorboard`.

    `first_step` is the first step that will be logged: on resuming, TensorBoard hides what an earlier
    process had logged from there on. Raises ConfigError when tensorboard is not installed.
    """

    def __init__(self, run: Path, first_step: int = 0) -> None:
        require("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step or None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, name: str, text: str) -> None:
        """Write a text; it is indented, because TensorBoard reads Markdown and shows code as it is."""
        code = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text(name, code, step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Write a table as text: TensorBoard has no tables, and its own Markdown would take a model's text for markup."""
        self.text(step, name, "\n\n".join("\n".join(f"{k}: {v}" for k, v in row.items()) for row in rows))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandbTracker:
    """Sends to Weights & Biases, or with `offline` writes `<run>/wandb` for `wandb sync`.

    A resumed run continues the same Weights & Biases run, named and identified by its folder's name.
    Raises ConfigError when wandb is not installed or will not start.
    """

    def __init__(
        self, run: Path, project: str, *, offline: bool, config: Mapping[str, Any] | None = None
    ) -> None:
        self._wandb = require("wandb")
        name = run.resolve().name
        try:
            self._run = self._wandb.init(
                project=project,
                name=name,
                id=re.sub(r"[^A-Za-z0-9_-]", "-", name),
                resume=None if offline else "allow",
                dir=str(run),
                mode="offline" if offline else "online",
                config=dict(config or {}),
                # Standard output belongs to the panel or to --json.
                settings=self._wandb.Settings(silent=True, console="off"),
            )
        except self._wandb.Error as error:
            raise ConfigError(
                f"Weights & Biases does not start: {str(error).rstrip('.')}. Set WANDB_API_KEY, or `offline: true` for this tracker."
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Send a text, escaped: what a model wrote is not markup."""
        self._run.log({name: self._wandb.Html(f"<pre>{html.escape(text)}</pre>")}, step=step)

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Send a table; its cells are shown as text."""
        columns = list(rows[0]) if rows else []
        data = [[row[column] for column in columns] for row in rows]
        self._run.log({name: self._wandb.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Send what is pending and end."""
        self._run.finish()


class Guarded:
    """A tracker whose failures stop nothing: it is left alone after the first one, which is said."""

    def __init__(self, name: str, begin: Callable[[], Tracker], say: Callable[[str], None]) -> None:
        """Begin the tracker; `say` says in one line that it has failed. Raises ConfigError where settings are wrong."""
        self._name, self._say = name, say
        self._tracker: Tracker | None = None
        try:
            self._tracker = begin()
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - a server that is away stops no run
            self._end(error)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._try(lambda tracker: tracker.log(step, metrics))

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text."""
        self._try(lambda tracker: tracker.text(step, name, text))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record rows of text."""
        self._try(lambda tracker: tracker.table(step, name, rows))

    def close(self) -> None:
        """Write what is pending and end."""
        self._try(lambda tracker: tracker.close())

    def _try(self, act: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            act(self._tracker)
        except Exception as error:  # noqa: BLE001 - whatever a tracker does, the run directory has everything
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._tracker = None
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        self._say(
            f"the tracker '{self._name}' has failed and gets nothing more ({reason}); the run directory has it all"
        )


def open_trackers(
    settings: Sequence[Any], run: Path, config: Mapping[str, Any], say: Callable[[str], None] = lambda _: None
) -> list[Tracker]:
    """Open the trackers of a run's settings (`TrackerConfig`), like `open_tracker`; none stays open where one is refused.

    One that fails, when it is opened too, is left alone and said once, by `say`; the run goes on.
    """
    saved = saved_steps(run)
    first = saved + 1 if saved else 0
    opened: list[Tracker] = []
    with ExitStack() as refused:
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
            refused.callback(opened[-1].close)
        refused.pop_all()
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
    """Return the tracker of a name; raises ConfigError if it is not installed."""
    if name == "tensorboard":
        return TensorBoardTracker(run, first_step)
    if name == "wandb":
        return WandbTracker(run, project, offline=offline, config=config)
    if name in ("mlflow", "trackio"):
        from kapelle.runs import more_trackers

        made = more_trackers.Mlflow if name == "mlflow" else more_trackers.Trackio
        return made(require(name), run, project, offline=offline, config=config)
    raise ConfigError(f"Unknown tracker '{name}'. Known: mlflow, tensorboard, trackio, wandb.")


def check_tracker(name: str) -> None:
    """Raise ConfigError when a tracker is not installed; imports nothing."""
    if importlib.util.find_spec(name) is None:
        raise _missing(name)


def require(module: str) -> Any:
    """Return a module; ConfigError, naming its extra, where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module) from error


def _missing(name: str) -> ConfigError:
    return ConfigError(
        f"The tracker '{name}' is not installed. Install it with: pip install 'kapelle[{name}]'"
    )
