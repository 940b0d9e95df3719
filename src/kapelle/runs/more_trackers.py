"""MLflow and trackio as trackers of a run; `trackers` has the protocol and opens them."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

RUN = "kapelle.run"
"""Tag by which a resumed run finds the one that it began."""
_ODD = re.compile(r"[^A-Za-z0-9_\-. /]")


class Mlflow:
    """Logs to MLflow: `offline` into `<run>/mlflow`, else to the server of MLFLOW_TRACKING_URI.

    A resumed run continues the run that has its folder's name as a tag.
    """

    def __init__(
        self, mlflow: Any, run: Path, project: str, *, offline: bool, config: Mapping[str, Any] | None = None
    ) -> None:
        name = run.resolve().name
        place = None
        if offline:
            place = (run.resolve() / "mlflow").as_uri()
            # Its small package has no database, and without this its newer versions refuse a folder.
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
        """Record the metrics of a step; characters that MLflow refuses in names become `_`."""
        for name, value in metrics.items():
            self._client.log_metric(self._id, _ODD.sub("_", name), float(value), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text as a file."""
        self._client.log_text(self._id, text, f"{_ODD.sub('_', name)}/{step:08d}.txt")

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record a table as JSON, in the form of pandas' `split`, which MLflow shows as a table."""
        columns = list(rows[0]) if rows else []
        data = {"columns": columns, "data": [[row[column] for column in columns] for row in rows]}
        self._client.log_text(self._id, json.dumps(data), f"{_ODD.sub('_', name)}/{step:08d}.json")

    def close(self) -> None:
        """End the run; a resumed one opens it again by writing."""
        self._client.set_terminated(self._id)


class Trackio:
    """Logs to trackio's own store on this machine (TRACKIO_DIR), or not `offline` to a Space of the project's name.

    A resumed run continues the trackio run of its folder's name.
    """

    def __init__(
        self, trackio: Any, run: Path, project: str, *, offline: bool, config: Mapping[str, Any] | None = None
    ) -> None:
        self._trackio = trackio
        with redirect_stdout(sys.stderr):  # standard output belongs to the panel or to --json
            self._run = trackio.init(
                project=project,
                name=run.resolve().name,
                config=json.loads(json.dumps(dict(config or {}), default=str)),
                space_id=None if offline else project,
                resume="allow",
                embed=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Record a text as a table of one cell, which shows it as it is."""
        self.table(step, name, [{"text": text}])

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, str]]) -> None:
        """Record a table."""
        columns = list(rows[0]) if rows else []
        data = [[row[column] for column in columns] for row in rows]
        self._run.log({name: self._trackio.Table(columns=columns, data=data)}, step=step)

    def close(self) -> None:
        """Write what is pending and end."""
        with redirect_stdout(sys.stderr):
            self._run.finish()
