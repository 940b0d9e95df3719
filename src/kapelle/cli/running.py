"""Trains a run as a command: shows its progress while it runs, and prints a summary at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kapelle.cli.output import command, is_first, leave_ranks_here
from kapelle.cli.source import Source
from kapelle.cli.stopping import exit_code
from kapelle.errors import KapelleError
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runs.failure import read_failure
from kapelle.runs.lock import now
from kapelle.runs.reader import is_run, read_config, read_evaluations, saved_steps
from kapelle.runtime.console import say
from kapelle.runtime.files import step_of
from kapelle.runtime.interrupts import stop_within
from kapelle.runtime.process_tree import doing, stalled_after
from kapelle.settings.overlays import parse_yaml
from kapelle.training.console import (
    Lines,
    Point,
    ProgressLine,
    ShownConversation,
    Watch,
    conversation,
    judged,
    one_line,
    point_of,
    returns,
)

if TYPE_CHECKING:
    from kapelle.runs.pace import Pace
    from kapelle.runs.verdict import Verdict
    from kapelle.training.trainer import Summary
    from kapelle.types import Episode, Group


def announce(title: str, *, as_json: bool) -> None:
    """Print immediately that torch is being imported, because the import takes seconds.

    Raises ConfigError for invalid environment variables.
    """
    stalled_after()
    stop_within()
    doing("loading torch and transformers")
    if is_first():
        say(f"{title}: loading torch and transformers …", sys.stderr if as_json else sys.stdout)


def train(source: Source, title: str, *, as_json: bool, plain: bool) -> int:
    """Train the run that `source` describes, print its `Report` and return the exit code."""
    from kapelle.runs.writer import new_path

    run_dir = source.run_dir or new_path(source.name)
    stream = sys.stderr if as_json else sys.stdout
    since = now()
    summary: Summary | None = None
    stopped_by = parameters = 0
    with _view(stream, title, _about(source), run_dir, plain=plain, new=not source.resume) as view:
        from kapelle.environment import report_of
        from kapelle.runtime.deadlines import Patience
        from kapelle.runtime.foreign_code import call_user_code

        environment = source.config.environment
        # The environment may be the user's own code, and is not checked yet.
        opposed = call_user_code(
            "constant_sum", Patience.environment, lambda: report_of(environment).constant_sum
        )
        watch = Watch(view, constant_sum=opposed)
        try:
            from kapelle.training.trainer import Trainer

            with Trainer(
                source.config,
                origin=source.origin,
                run_dir=run_dir,
                resume=source.resume,
                observer=watch,
                start_from=source.start_from,
            ) as trainer:
                models = trainer.models.values()
                parameters = sum(p.numel() for model in models for p in model.base_parameters().values())
                summary = trainer.train()
                stopped_by = summary.stopped_by
        except Exception:
            for line in _failed(run_dir, since):
                say(line, stream)
            raise  # its reason is printed last
        except KeyboardInterrupt:
            stopped_by = exit_code()
            leave_ranks_here(
                "a stop signal has ended it"
            )  # the other ranks would wait for this one at their next collective call
    if not is_first():
        return stopped_by
    report = _report(watch, summary, run_dir, parameters, stopped_by)
    if as_json:
        say(json.dumps(report.row()))
    elif summary is not None and not stopped_by:
        for line in report.lines():
            say(line)
    if stopped_by and not is_run(run_dir) and source.whole is None:
        say("stopped before the run began.", stream)
    elif stopped_by:
        in_warmup = summary is None and watch.now.phase == "warm-up"
        lost = "the warm-up starts over" if in_warmup else "nothing is lost"
        how = command("train", "--resume", str(source.whole or run_dir))
        say(f"stopped; {lost}. Continue with: {how}", stream)
    return stopped_by


def _report(watch: Watch, summary: Summary | None, run_dir: Path, parameters: int, stopped_by: int) -> Report:
    from kapelle.runs.definitions import has_rated_feature
    from kapelle.runs.summary import pace_at, verdict_of

    # Read from the run: if it was resumed, an earlier process evaluated it before training.
    rows = [point_of(row) for row in read_evaluations(run_dir)] if is_run(run_dir) else []
    config = parse_yaml(read_config(run_dir)) if is_run(run_dir) else {}
    checkpoints = list_checkpoints(run_dir / "checkpoints") if has_rated_feature(config) else []
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
        length="epochs" if config.get("training", {}).get("epochs") else "steps",
        earlier=step_of(checkpoints[0]) if len(checkpoints) > 1 else None,
        stopped_by=stopped_by,
        notes=tuple(watch.notes),
        changes=tuple(watch.changes),
        verdict=verdict_of(run_dir),
        pace=pace_at(run_dir),
    )


def _failed(run_dir: Path, since: str) -> list[str]:
    """Return lines about the health, the failed episodes and the folder of a run that failed in this process."""
    try:
        failure = read_failure(run_dir) if is_first() and is_run(run_dir) else None
    except KapelleError:
        return []
    if failure is None or failure.at < since:
        return []
    how = command("runs", "show", str(run_dir))
    return [
        *failure.lines()[1:],
        _row("run", f"{run_dir} failed after step {failure.step}; reason and log: {how}"),
    ]


def _about(source: Source) -> list[str]:
    """Return the recipe's description and notes, and a note about the embedded model."""
    from kapelle.cluster.planning.weights_map import amount
    from kapelle.models.outline import read_outline

    model = source.config.model
    lines = [" ".join(source.config.description.split())] if source.config.description else []
    if model.path == "embedded":
        count = amount(read_outline(model.path, model.embedded).parameters)
        lines.append(
            f"The model is tiny ({count} parameters): it is created and trained from scratch on this machine, without a "
            "download."
        )
    return [*lines, *source.notes]


@contextmanager
def _view(
    stream: TextIO, title: str, about: Sequence[str], run_dir: Path, *, plain: bool, new: bool
) -> Iterator[Callable[[ProgressLine], None]]:
    """Yield a function that shows the progress, in a live panel if the output is a terminal and as lines otherwise.

    Only the first rank prints the progress.
    """
    if not is_first():
        yield lambda _: None
        return
    if plain or not stream.isatty() or os.environ.get("TERM") == "dumb":
        # A new run fails if its folder already contains a run, so nothing will be saved there.
        yield Lines(stream, before=about, run_dir=None if new and is_run(run_dir) else run_dir)
        return
    from rich.console import Console

    from kapelle.cli.panel import Panel

    with Panel(title, about, str(run_dir), Console(file=stream)) as panel:
        yield panel


# -------- The result of a run, for people and for programs


@dataclass(frozen=True, slots=True)
class Report:
    """The summary that is printed at the end of a run."""

    steps: int
    """The number of training steps of the weights."""
    before: Point | None
    after: Point | None
    """The results after training, or None for a run that was stopped."""
    learned: tuple[ShownConversation, ShownConversation] | None
    """The conversations about one problem before and after training."""
    seconds: Mapping[str, float]
    """The duration in seconds, by phase."""
    parameters: int
    """The total number of parameters of all base models."""
    run_dir: Path
    length: str
    """The setting in the section `training` that determines the length of the run."""
    stopped_by: int
    """The exit code of the signal that stopped the run, or 0 if the run was not stopped."""
    notes: tuple[tuple[str, str], ...] = ()
    """Notes about the data and the engine, each as a pair of a name and a text."""
    changes: tuple[str, ...] = ()
    """The changes since the last start of a resumed run."""
    verdict: Verdict | None = None
    """The assessment of whether the run is healthy, or None if the run cannot be read."""
    pace: Pace | None = None
    """How the time of the last steps is divided into phases, or None if the run has too few steps."""
    earlier: int | None = None
    """The step of the oldest checkpoint, as an opponent in a game. The value is None if the run is not a game or has no other
    checkpoint."""

    def row(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        before, after = self.before, self.after
        last = after or before
        shown = (
            None
            if self.learned is None
            else [
                {
                    "question": each.question,
                    "texts": [{"agent": agent, "text": text} for agent, text in each.texts],
                    "score": each.score,
                    "returns": dict(each.returns),
                }
                for each in self.learned
            ]
        )
        row: dict[str, Any] = {"interval": _listed(after), "interval_before": _listed(before)}
        for when, point in (("before", before), ("after", after)):
            row[f"accuracy_{when}"] = point.success if point else None
            row[f"scored_{when}"] = point.rate.scored if point else None
            row[f"failed_{when}"] = point.failed if point else None
            row[f"reward_{when}"] = dict(point.reward) if point else None
        for name in ("problems", "reason", "fewer"):
            row[name] = getattr(last, name) if last else None
        if after and after.verifier:
            row["verifier"] = dict(after.verifier)
        for phase in ("warm-up", "training", "evaluation"):
            row[f"seconds_{phase.replace('-', '')}"] = round(self.seconds.get(phase, 0.0), 3)
        return {
            **row,
            "seconds_total": round(sum(self.seconds.values()), 3),
            "steps": self.steps,
            "parameters": self.parameters,
            "conversation": shown,
            "run_dir": str(self.run_dir),
            "stopped_by": self.stopped_by,
            **{name: [note for of, note in self.notes if of == name] for name in ("data", "engine")},
            "changed": list(self.changes),
            "health": None if self.verdict is None else self.verdict.row(),
            "pace": None if self.pace is None else asdict(self.pace),
        }

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        run = str(self.run_dir)
        phases = [name for name in ("warm-up", "training", "evaluation") if name in self.seconds]
        rows = (
            []
            if self.learned is None
            else [("before", one_line(self.learned[0])), ("after", one_line(self.learned[1]))]
        )
        rows.append(("time", ", ".join(f"{name} {self.seconds[name]:.1f} s" for name in phases)))
        rows += self.notes
        rows += [("changed", change) for change in self.changes]
        rows += [("health", line) for line in (self.verdict.lines() if self.verdict else ())]
        rows += [("pace", self.pace.line())] if self.pace and self.pace.change else []
        rows += [("run", run), ("see it", command("view", run))]
        if self.earlier is None:
            rows.append(("measure", command("eval", run)))
        else:
            rows += [
                ("play it", command("play", run)),
                ("measure", command("arena", run, f"{run}@{self.earlier}")),
            ]
        if (
            self.verdict is None or self.verdict.word != "diverging"
        ):  # the advice for `diverging` is a lower rate
            rows.append(("go on", f"{command('train', '--resume', run)} training.{self.length}=N"))
        return ["", *self._scores(), *(_row(*row) for row in rows)]

    def _scores(self) -> list[str]:
        """Return the results before and after training with their counts. If both counts are equal, the count is printed only once."""
        measured = self.after or self.before
        if measured is not None and measured.verifier is not None:
            return _judge(None if measured is self.before else self.before, measured)
        points = [point for point in (self.before, self.after) if point is not None]
        if not points:
            return [_row("steps", str(self.steps))]
        alike = len({(point.is_game, point.counts()) for point in points}) == 1
        texts = [
            "not measured" if each is None else each.text() if alike else f"{each.text()}, {each.counts()}"
            for each in (self.before, self.after)
        ]
        whole = points[0].counts(" unseen problems") if alike else "on unseen problems"
        games = all(point.is_game for point in points)
        intervals = ", 95 % intervals" if any(point.interval for point in points) else ""
        name = "return" if games else "score" if any(point.games for point in points) else "accuracy"
        lines = [_row(name, f"{texts[0]}  →  {texts[1]}  {whole}{intervals}")]
        for part in dict.fromkeys(part for point in points for part in point.part_reward):
            earned = [returns(p.part_reward[part]) for p in points if part in p.part_reward]
            lines.append(_row("", f"{part}: return {'  →  '.join(earned)}"))
        reasons = dict.fromkeys(point.reason for point in points if point.reason)
        return [*lines, *(_row("", f"not scored: {reason}") for reason in reasons)]


def _row(name: str, text: str) -> str:
    return f"{name:10}{text}"


def _judge(before: Point | None, after: Point) -> list[str]:
    """Return how well a verifier judges held-out answers, and how well its probabilities are calibrated."""
    found = after.verifier or {}
    then = f"{judged(before.verifier)}  →  " if before and before.verifier else ""
    both = f"{judged(found)}  among answers to one of {found['both']} held-out questions, 95 %"
    lines = [_row("verifier", f"{then}{both}")]
    if found["auc"] is None:
        return lines
    low, high = found["interval"] or (0.0, 1.0)
    over_all = f"{found['answers']} answers to {found['questions']} questions, {100 * found['right']:.1f} % of them right"
    return [
        *lines,
        _row("", f"AUC {found['auc']:.3f} [{low:.3f}, {high:.3f}] over all {over_all}"),
        _row("", f"calibration error {found['calibration_error']:.3f}, Brier score {found['brier']:.3f}"),
    ]


def _listed(point: Point | None) -> list[float] | None:
    return list(point.interval) if point and point.interval else None


def learned(
    before: Sequence[Group], after: Sequence[Group]
) -> tuple[ShownConversation, ShownConversation] | None:
    """Return the conversations about the first problem that was answered incorrectly before training and correctly after training.

    The result is None if there is no such problem. Episodes that failed or were not scored count as neither correct nor
    incorrect.
    """
    first = {group.task.id: group.episodes[0] for group in before}
    for group in after:
        old, new = first.get(group.task.id), group.episodes[0]
        if old is not None and _solved(old) is False and _solved(new):
            return conversation(old), conversation(new)
    return None


def _solved(episode: Episode) -> bool | None:
    """Return whether an episode was correct, or None if the episode failed or was not scored."""
    return None if episode.error is not None or episode.success is None else episode.success == 1.0
