"""The picture of a comparison: medians over seeds with their interquartile bands, step by step.

Needs matplotlib (`pip install 'kapelle[plot]'`), which is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kapelle.comparison.results import Curve
from kapelle.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Curve]],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write an SVG with one panel for each entry (its title → label → curve); `notes` are appended to labels.

    The same curves give the same bytes. Raises ConfigError where matplotlib is missing.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("Nothing was drawn: matplotlib is missing. pip install 'kapelle[plot]'") from None
    # Ids in the file are hashes; without a salt of our own they would differ from run to run.
    with mpl.rc_context({"svg.hashsalt": "kapelle", "svg.fonttype": "none"}):
        figure = Figure(figsize=(5 * len(panels) + 1.5, 3.6), layout="constrained")
        FigureCanvasSVG(figure)
        figure.suptitle(title)
        for number, (name, curves) in enumerate(panels.items(), start=1):
            axes = figure.add_subplot(1, len(panels), number)
            axes.set_title(name, fontsize="medium")
            axes.set_xlabel("step")
            axes.set_ylabel("success, or mean return")
            _fill(axes, curves, notes or {})
        lines, labels = figure.axes[0].get_legend_handles_labels() if panels else ([], [])
        if lines:
            columns = -(-len(lines) // COLORS)
            figure.legend(
                lines, labels, loc="outside right upper", ncols=columns, fontsize="small", frameon=False
            )
        figure.savefig(path, format="svg", metadata={"Date": None})


COLORS = 10
"""Number of colours; after them they repeat with another stroke."""
STROKES = ("-", "--", ":", "-.")
BANDS = 6
"""Up to so many curves, quartiles are drawn as bands; for more, as bars next to the last step, which do not overlap."""
FEW = 12
"""Up to so many points of a curve, each is marked, so that the lines between them are not mistaken for data."""


def _fill(axes: Axes, curves: Mapping[str, Curve], notes: Mapping[str, str]) -> None:
    for number, (label, curve) in enumerate(curves.items()):
        steps = list(curve)
        (line,) = axes.plot(
            steps,
            [curve[s].median for s in steps],
            label=f"{label}, {notes[label]}" if label in notes else label,
            linewidth=1.5,
            linestyle=STROKES[number // COLORS % len(STROKES)],
            marker=_marker(steps),
        )
        low, high = [curve[s].low for s in steps], [curve[s].high for s in steps]
        if len(curves) <= BANDS:
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        elif steps:
            beside = steps[-1] + (steps[-1] - steps[0]) * 0.015 * (number + 1)
            axes.vlines(beside, low[-1], high[-1], color=line.get_color(), linestyle=line.get_linestyle())


def _marker(steps: Sequence[int]) -> str:
    return "o" if len(steps) <= FEW else ""
