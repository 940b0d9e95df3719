"""The plain view of a run: one line per event, readable in a log file."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from kapelle.cli.output import printable, returns, say
from kapelle.cli.progress import Conversation, Progress, clock_text, judged
from kapelle.metrics.definitions import DEMONSTRATED, UNSCORED
from kapelle.runs.reader import is_run

WARMUP_LINES = 10
"""Lines for a whole warm-up."""


class Lines:
    """Prints every change of a run's progress as a line that starts with the seconds since the start."""

    def __init__(
        self,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        *,
        before: Sequence[str] = (),
        run_dir: Path | None = None,
    ) -> None:
        """`before`: lines before the first one. `run_dir` is named once it is there: a run that cannot begin keeps nothing."""
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._before = list(before)
        self._run_dir = run_dir

    def __call__(self, progress: Progress) -> None:
        """Print what has just happened, if it is worth a line."""
        while self._before:
            say(self._before.pop(0), self._stream)
        if self._run_dir is not None and is_run(self._run_dir):
            say(f"The run is kept in {self._run_dir}.", self._stream)
            self._run_dir = None
        text = _line(progress)
        if text:
            say(f"[{self._clock() - self._start:6.1f} s] {text}", self._stream)


def _line(progress: Progress) -> str:
    if progress.event == "warmup":
        every = max(1, progress.steps // WARMUP_LINES)
        if progress.step % every and progress.step != progress.steps:
            return ""
        loss = next((v for name, v in progress.metrics.items() if name.startswith("nll/")), None)
        suffix = "" if loss is None else f"  {loss:.3f} nats a token"
        return f"warm-up step {progress.step}/{progress.steps}{suffix}{_left(progress)}"
    if progress.event == "step":
        return _step(progress)
    if progress.event == "evaluation":
        point = progress.points[-1]
        if point.verifier is not None:
            return f"held-out questions after step {point.step}: {judged(point.verifier)} of {point.problems}"
        why = f": {point.reason}" if point.reason else ""
        what = "return " if point.is_game else ""
        return f"unseen problems after step {point.step}: {what}{point.text()}, {point.counts()}{why}"
    return f"{progress.phase}: {progress.detail}" if progress.detail else ""


def _step(progress: Progress) -> str:
    rewards = "  ".join(f"{agent} {value:.3f}" for agent, value in progress.rewards.items())
    learned = "  ".join(f"{value:.3f} {name}" for name, value in progress.learning.items())
    speed = progress.metrics.get("time/tokens_per_second", 0.0)
    parts = [f"step {progress.step}/{progress.steps}", *([learned] if learned else [])]
    parts += [f"nothing to learn from: {progress.idle}"] if progress.idle else []
    parts += [f"reward {rewards}"] if rewards else []
    parts += [*_counts(progress.metrics, idle=bool(progress.idle)), f"{speed:.0f} tokens/s{_left(progress)}"]
    if progress.conversations:
        parts.append(one_line(progress.conversations[0]))
    return "  ".join(parts)


def _left(progress: Progress) -> str:
    return "" if progress.left is None else f"  {clock_text(progress.left)} left"


def _counts(metrics: Mapping[str, float], *, idle: bool = False) -> list[str]:
    """Return notes on episodes that the step's figures leave out, because they failed or were not scored."""
    samples, failed = metrics.get("samples", 0.0), metrics.get("failed_episodes", 0.0)
    notes = [f"{round(failed * samples)} of {samples:.0f} episodes failed"] if failed else []
    if "success" in metrics and metrics.get("scored", samples) < samples:
        notes.insert(0, f"scored {metrics['scored']:.0f} of {samples:.0f}")
    elif unscored := metrics.get(UNSCORED):
        notes.insert(0, f"scored {samples - unscored - failed * samples:.0f} of {samples:.0f}")
    if (
        metrics.get("dead_groups") == 1.0
        and not idle
        and not any(name.startswith(DEMONSTRATED) for name in metrics)
    ):
        notes.append("every attempt at a task earned the same")
    undone = [name.partition("/")[2] for name in metrics if name.startswith("undone/")]
    notes += [f"an update of {', '.join(undone)} broke its weights and was undone"] if undone else []
    return [*notes, *(["the mixer's fit was undone"] if "mixer_undone" in metrics else [])]


def one_line(shown: Conversation, width: int = 100) -> str:
    """Return a conversation on one line: question → each agent's text → the verdict."""
    each = max(12, width // (1 + len(shown.texts)))
    words = [f"{agent}: {printable(text, each) or '(nothing)'}" for agent, text in shown.texts]
    pieces = [printable(shown.question, each), *words]
    return " → ".join([piece for piece in pieces if piece] + [verdict(shown)])


def verdict(shown: Conversation) -> str:
    """Return how a conversation ended: `right`, `wrong`, or the score in between; in games what each seat earned."""
    earned = shown.score
    if shown.note:
        return shown.note
    if earned is None and shown.returns:
        return returns(shown.returns)
    if earned is None:
        return "no score"
    return {1.0: "right", 0.0: "wrong"}.get(earned, f"{earned:.2f}")
