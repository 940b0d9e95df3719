"""The plain and the live view of the same progress."""

from __future__ import annotations

import io

from rich.console import Console

from kapelle.cli.panel import Panel
from kapelle.training.console import Point, ProgressLine, ShownConversation

RIGHT = ShownConversation("47+85", (("reasoner", "2,11+1"), ("actor", "132")), 1.0)
WRONG = ShownConversation("38+24", (("reasoner", "2,5"), ("actor", "52")), 0.0)
BEFORE = Point(0, 0.542, (0.498, 0.585), 500, {"actor": 0.542}, 500)
LATER = Point(20, 0.71, (0.614, 0.79), 100, {"actor": 0.71}, 98, 2, "EpisodeError: x")
STEP = ProgressLine(
    event="step",
    phase="training",
    step=23,
    steps=50,
    metrics={"time/tokens_per_second": 4210.4},
    rewards={"reasoner": 0.703, "actor": 0.703},
    history=(0.5, 0.6, 0.7),
    points=(BEFORE, LATER),
    conversations=(RIGHT, WRONG),
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def drawn(progress: ProgressLine, width: int = 100) -> str:
    stream, clock = io.StringIO(), Clock()
    panel = Panel("kapelle demo", ["A team.", "A tiny\nmodel."], "runs/x", Console(file=io.StringIO()), clock)
    clock.now = 83.0
    panel(progress)
    console = Console(file=stream, width=width, force_terminal=False, color_system=None)
    console.print(panel.render())
    return stream.getvalue()


def test_the_panel_shows_everything_at_once() -> None:
    text = drawn(STEP)
    for part in (
        "kapelle demo",
        "│ A team. ",
        "│ A tiny⏎model. ",
        "training",
        "23/50 steps",
        "reasoner 0.70   actor 0.70   ▅▅▆",
        "71.0 % [61.4, 79.0], scored 98 of 100, 2 failed after step 20 ← 54.2 %",
        "4,210 tokens/s",
        "✓ 47+85 → reasoner 2,11+1 → actor 132",
        "✗ 38+24 → reasoner 2,5 → actor 52",
        "1:23  runs/x",
    ):
        assert part in text
    *frame, hint = text.splitlines()
    assert all(len(line) == 100 for line in frame)
    assert len(hint.rstrip()) < 38, "the echo of ^C must fit behind it on the narrowest terminal"


def test_completions_are_shown_without_markup_and_control_characters() -> None:
    evil = ShownConversation("[bold]q[/bold]", (("a", "[red]x[/red] \x1b[31m\x1b]0;title\x07"),), 0.0)
    text = drawn(ProgressLine(conversations=(evil,)))
    assert "[bold]q[/bold] → a [red]x[/red] \\x1b[31m\\x1b]0;title\\x07" in text
    assert "\x1b" not in text
