"""Shows the live view of a run in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Frame
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kapelle.runtime.console import printable
from kapelle.training.console import SHOWN, ProgressLine, ShownConversation, clock_text, judged, verdict

SPARKS = "▁▂▃▄▅▆▇█"
HINT = "Ctrl-C stops; nothing is lost"
WARMUP_HINT = "Ctrl-C stops; an unfinished warm-up starts over"
REFRESHES = 4
"""The number of redraws per second."""


class Panel:
    """A context manager that draws the most recent progress several times per second."""

    def __init__(
        self,
        title: str,
        about: Sequence[str],
        footer: str,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._about = about
        self._footer = footer
        self._clock = clock
        self._start = clock()
        self._progress = ProgressLine()
        self._over = False
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=REFRESHES)

    def __call__(self, progress: ProgressLine) -> None:
        """Store a new state of the progress, which is drawn at the next refresh."""
        self._progress = progress

    def __enter__(self) -> Self:
        self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error, only the line with the error remains, without an empty frame.
        self._live.transient = kind is not None and issubclass(kind, Exception)
        self._over = True
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the current state as a renderable object."""
        progress = self._progress
        elapsed = int(self._clock() - self._start)
        shown: list[RenderableType] = [_conversation(each) for each in progress.conversations]
        body = Group(
            Text("\n".join(map(printable, self._about)), style="dim"),
            Text(""),
            _now(progress),
            _facts(progress),
            Text(""),
            *(shown + [Text("")] * (SHOWN - len(shown))),
        )
        frame = Frame(
            body,
            title=Text(f" {printable(self._title)} ", style="bold"),
            title_align="left",
            subtitle=Text(f" {elapsed // 60}:{elapsed % 60:02d}  {printable(self._footer)} ", style="dim"),
            subtitle_align="right",
            border_style="cyan",
        )
        # The terminal echoes ^C at the cursor: on a full last line it would push the frame up.
        hint = WARMUP_HINT if self._progress.phase == "warm-up" else HINT
        return frame if self._over else Group(frame, Text(hint, style="dim", no_wrap=True))


def _now(progress: ProgressLine) -> RenderableType:
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(no_wrap=True, min_width=10)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    if progress.steps:
        bar: RenderableType = ProgressBar(total=progress.steps, completed=progress.step)
        count = f"{progress.step}/{progress.steps} steps"
        if progress.left is not None:
            count += f", {clock_text(progress.left)} left"
    else:
        bar = Text(printable(progress.detail), style="dim", overflow="ellipsis", no_wrap=True)
        count = ""
    row.add_row(Text(progress.phase, style="bold cyan"), bar, Text(count))
    return row


def _facts(progress: ProgressLine) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=10, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis")
    rewards = Text("   ").join(
        Text.assemble(f"{agent} ", (f"{value:.2f}", "bold")) for agent, value in progress.rewards.items()
    )
    learned = Text("   ").join(
        Text.assemble((f"{value:.3f}", "bold"), f" {name}") for name, value in progress.learning.items()
    )
    idle = Text(f"nothing to learn from: {progress.idle}" if progress.idle else "", style="yellow")
    shown = Text("   ").join([part for part in (learned, idle, rewards) if part])
    shown.append(f"   {sparkline(progress.history)}", style="green")
    table.add_row(
        "learning" if learned or idle else "return", shown if learned or idle or rewards else Text("–")
    )
    unseen = Text("–")
    if progress.points:
        first, last = progress.points[0], progress.points[-1]
        if last.verifier is not None:
            unseen = Text(
                f"{judged(last.verifier)} on {last.problems} held-out questions after step {last.step}"
            )
        else:  # the newest first: a narrow terminal cuts off the end
            unseen = Text.assemble((last.text(), "bold green"), f", {last.counts()} after step {last.step}")
            if last is not first:
                unseen.append(f" ← {first.text()}, {first.counts()} after step {first.step}")
    table.add_row("unseen", unseen)
    speed = progress.metrics.get("time/tokens_per_second")
    table.add_row("speed", Text(f"{speed:,.0f} tokens/s" if speed else "–"))
    return table


def _conversation(shown: ShownConversation) -> Text:
    # Text, never markup: a model's output must not style or move anything.
    line = Text(printable(shown.question, 60), overflow="ellipsis", no_wrap=True)
    for agent, text in shown.texts:
        line.append(" → ", style="dim")
        line.append(f"{agent} ", style="dim")
        line.append(printable(text, 60) or "(nothing)", style="bold")
    right = {1.0: ("✓", "bold green"), 0.0: ("✗", "bold red")}
    mark, style = right.get(-1.0 if shown.score is None else shown.score, (verdict(shown), "yellow"))
    return Text.assemble((f"{mark} ", style), line, overflow="ellipsis", no_wrap=True)


def sparkline(values: tuple[float, ...], width: int = 30) -> str:
    """Return the last values as a string of bars. The scale ranges from the smallest to the largest of 0, 1 and all values."""
    if not values:
        return ""
    low, high = min(0.0, *values), max(1.0, *values)
    top = len(SPARKS) - 1
    return "".join(SPARKS[round(top * (value - low) / (high - low))] for value in values[-width:])
