"""One training run as a command: shown while it runs, summarised at its end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kapelle.cli.lines import Lines
from kapelle.cli.output import command, is_first, leave_ranks_here, say
from kapelle.cli.progress import Progress, Watch, point_of
from kapelle.cli.source import Source
from kapelle.cli.stopping import exit_code
from kapelle.runs.reader import is_run, read_evaluations, saved_steps
from kapelle.runtime.family import doing, stalled_after

if TYPE_CHECKING:
    from kapelle.cli.report import Report
    from kapelle.training.summary import Summary
    from kapelle.training.trainer import Trainer

NextCommands = Callable[[str], Sequence[tuple[str, str]]]
"""What to try after a run: (command, what it does), from the run directory."""


def announce(title: str, *, as_json: bool) -> None:
    """Print at once that something is happening: importing torch takes seconds. Raises ConfigError for an environment that it cannot read."""
    stalled_after()
    doing("loading torch and transformers")
    if is_first():
        say(f"{title}: loading torch and transformers …", sys.stderr if as_json else sys.stdout)


def train(source: Source, title: str, next_commands: NextCommands, *, as_json: bool, plain: bool) -> int:
    """Train the run that the source describes and return the exit code; `report.Report` is printed at the end."""
    from kapelle.runs.writer import new_path

    run_dir = source.run_dir or new_path(source.name)
    stream = sys.stderr if as_json else sys.stdout
    summary: Summary | None = None
    stopped_by = parameters = 0
    with _view(stream, title, _about(source), run_dir, plain=plain) as view:
        watch = Watch(view, constant_sum=_is_constant_sum(source))
        try:
            with _trainer(source, run_dir, watch) as trainer:
                parameters = _parameters(trainer)
                summary = trainer.train()
                stopped_by = summary.stopped_by
        except KeyboardInterrupt as stop:
            stopped_by = exit_code(stop)
            leave_ranks_here("a stop has broken it off")  # this one comes to no place where they meet
    if not is_first():
        return stopped_by
    report = _report(watch, summary, run_dir, parameters, stopped_by)
    if as_json:
        say(json.dumps(report.row()))
    elif summary is not None and not stopped_by:
        for line in report.lines(next_commands(str(run_dir))):
            say(line)
    if stopped_by:
        whole = summary is not None and not summary.went_back
        lost = None if whole else _lost(watch.now.phase, run_dir)
        _say_how_to_continue(run_dir, source.whole or run_dir, lost, stream)
    return stopped_by


def _lost(phase: str, run_dir: Path) -> str | None:
    """Return what has to be repeated after a stop that broke off training; None for nothing."""
    if phase == "warm-up":
        return "the warm-up starts anew"
    if phase in ("training", "stopping"):
        return f"what came after step {saved_steps(run_dir)} is repeated"
    return None


def _trainer(source: Source, run_dir: Path, watch: Watch) -> Trainer:
    from kapelle.training.trainer import Trainer

    return Trainer(
        source.config,
        origin=source.origin,
        run_dir=run_dir,
        resume=source.resume,
        observer=watch,
        start_from=source.start_from,
    )


def _report(watch: Watch, summary: Summary | None, run_dir: Path, parameters: int, stopped_by: int) -> Report:
    from kapelle.cli.report import Report, learned

    # The run's own rows, because a run that was resumed was measured before by another process.
    rows = [point_of(row) for row in read_evaluations(run_dir)] if is_run(run_dir) else []
    before = rows[0] if rows and rows[0].step == 0 else None
    finished = summary is not None and summary.after is not None
    both = (summary.before, summary.after) if summary else (None, None)
    return Report(
        steps=summary.steps if summary else saved_steps(run_dir),
        before=before,
        after=rows[-1] if finished else None,
        learned=learned(both[0].groups, both[1].groups) if both[0] and both[1] else None,
        seconds=watch.seconds(),
        parameters=parameters,
        run_dir=run_dir,
        stopped_by=stopped_by,
        notes=tuple(watch.notes),
        changes=tuple(watch.changes),
    )


def _is_constant_sum(source: Source) -> bool:
    from kapelle.environment import Opposed

    environment = source.config.environment
    return isinstance(environment, Opposed) and environment.constant_sum


def _say_how_to_continue(run_dir: Path, whole: Path, lost: str | None, stream: TextIO) -> None:
    if is_run(run_dir) or whole != run_dir:
        how = command("train", "--resume", str(whole))
        say(f"stopped; {lost or 'nothing is lost'}. Continue with: {how}", stream)
    else:
        say("stopped before the run began.", stream)


def _about(source: Source) -> list[str]:
    """Return what is trained here, in words."""
    from kapelle.models.outline_reading import outline
    from kapelle.planning.weights_map import amount

    model = source.config.model
    lines = [" ".join(source.config.description.split())] if source.config.description else []
    if model.path == "embedded":
        count = amount(outline(model.path, model.embedded).parameters)
        lines.append(
            f"The model is tiny ({count} parameters), made and trained from scratch on this machine; no model is "
            "downloaded."
        )
    return [*lines, *source.notes]


def _parameters(trainer: Trainer) -> int:
    return sum(p.numel() for model in trainer.models.values() for p in model.base_parameters().values())


@contextmanager
def _view(
    stream: TextIO, title: str, about: Sequence[str], run_dir: Path, *, plain: bool
) -> Iterator[Callable[[Progress], None]]:
    """Yield the view of the progress: a live panel in a terminal, else lines; nothing but in the first of several ranks."""
    if not is_first():
        yield lambda _: None
        return
    if plain or not stream.isatty() or os.environ.get("TERM") == "dumb":
        yield Lines(stream, before=about, run_dir=run_dir)
        return
    from rich.console import Console

    from kapelle.cli.panel import Panel

    with Panel(title, about, str(run_dir), Console(file=stream)) as panel:
        yield panel
