"""Trackers beside the run directory: TensorBoard and Weights & Biases, each an optional extra.

The run directory always holds everything; a tracker is a second place to look at it.
"""

from __future__ import annotations

import html
import importlib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kapelle.errors import ConfigError


class Tracker(Protocol):
    """A further place for metrics besides the run directory."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text, such as a conversation; it is shown as it is, never as markup."""
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
        _require("tensorboard")
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
        self._wandb = _require("wandb")
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

    def close(self) -> None:
        """Send what is pending and end."""
        self._run.finish()


def open_trackers(settings: Sequence[Any], run: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Open the trackers of a run's settings (`TrackerConfig`), like `open_tracker`."""
    return [open_tracker(t.name, run, project=t.project, offline=t.offline, config=config) for t in settings]


def open_tracker(
    name: str,
    run: Path,
    *,
    project: str = "kapelle",
    offline: bool = True,
    first_step: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Tracker:
    """Return the tracker of a name, `tensorboard` or `wandb`; raises ConfigError if it is not installed."""
    if name == "tensorboard":
        return TensorBoardTracker(run, first_step)
    if name == "wandb":
        return WandbTracker(run, project, offline=offline, config=config)
    raise ConfigError(f"Unknown tracker '{name}'. Known: tensorboard, wandb.")


def check_tracker(name: str) -> None:
    """Raise ConfigError when a tracker is not installed; imports nothing."""
    if importlib.util.find_spec(name) is None:
        raise _missing(name)


def _require(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module) from error


def _missing(name: str) -> ConfigError:
    return ConfigError(
        f"The tracker '{name}' is not installed. Install it with: pip install 'kapelle[{name}]'"
    )
