"""The result of a comparison: each run's last evaluation, and medians with quartiles over the seeds of each contender.

`compare.json` holds `recipe`, `budget` (steps, tasks per step, episodes per task), `contenders` (label, algorithm and
the results over their seeds) and `runs`. Numbers that do not exist are null; a run that failed or has not ended has the
reason under `error`, and counts in no median. `success` is the mean over the `scored` of `problems` episodes of the
last evaluation; episodes that failed or were not scored are left out. Where one seat wins what the others lose, a mean
over seats is meaningless: there `returns` holds each seat's return.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from kapelle.comparison.contenders import Contender, Run
from kapelle.environment import is_opposed
from kapelle.errors import ConfigError
from kapelle.functional.statistics import Quartiles, quartiles
from kapelle.runs.reader import is_run, read_evaluations, read_metrics
from kapelle.runtime.files import replace_file, writing
from kapelle.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Measured:
    """One run's numbers."""

    label: str
    seed: int
    path: str
    """Of its run directory, inside the comparison's folder."""
    error: str | None
    """Why there are no numbers."""
    success: float | None = None
    """After training, on tasks that were not trained on, in [0, 1]; None where the environment has no success."""
    reward: Mapping[str, float] | None = None
    """Each agent's mean undiscounted return there."""
    tokens: float | None = None
    """Completion tokens sampled for training, by all agents."""
    seconds: float | None = None
    """Wall time of the training steps, which other work on the machine lengthens."""
    scored: int | None = None
    """Problems that `success` is the mean of; None in runs of versions that did not record it."""
    problems: int | None = None
    """Problems that were played."""
    failed: int | None = None
    """Those whose episode ended in an error."""
    reason: str = ""
    """Why problems failed or were not scored, the most frequent reason; and why fewer were played than asked for."""
    curve: Sequence[Mapping[str, Json]] = ()
    """Every evaluation: its `step`, the `tokens` sampled to train until then, `success`, the `scored` of `problems` that it is the mean
    of and those that `failed`, and each agent's `reward`."""

    @property
    def mean_return(self) -> float | None:
        """Mean over agents; meaningless where one wins what the others lose."""
        return fmean(self.reward.values()) if self.reward else None


def measure(run: Run, folder: Path) -> Measured:
    """Return the numbers in a run directory."""
    place = run.path.relative_to(folder).as_posix()
    if not run.done:
        failed = run.error_file.is_file()
        error = run.error_file.read_text("utf-8").partition("\n")[0] if failed else "not finished"
        return Measured(run.label, run.seed, place, error)
    rows, evaluations = read_metrics(run.path), read_evaluations(run.path)
    if not evaluations:
        return Measured(run.label, run.seed, place, "its evaluations.jsonl holds no row")
    last = evaluations[-1]
    return Measured(
        run.label,
        run.seed,
        place,
        None,
        last["success"],
        last["reward"],
        sum(map(_tokens, rows)),
        sum(row.get("time/step", 0.0) for row in rows),
        last.get("scored"),
        last.get("problems"),
        last.get("failed"),
        "; ".join(why for why in (last.get("reason", ""), _fewer(last)) if why),
        [
            {
                "step": each["step"],
                "tokens": sum(_tokens(row) for row in rows if row["step"] <= each["step"]),
                "success": each["success"],
                "scored": each.get("scored"),
                "problems": each.get("problems"),
                "failed": each.get("failed"),
                "reward": each["reward"],
            }
            for each in evaluations
        ],
    )


def _fewer(evaluation: Mapping[str, Any]) -> str:
    """Return on how many problems a run was evaluated, and why on no more; empty where on as many as asked for."""
    fewer = evaluation.get("fewer", "")
    return f"evaluated on {evaluation.get('problems')} problems: {fewer}" if fewer else ""


def _tokens(row: Mapping[str, Any]) -> float:
    """Return the tokens that all agents sampled in a step."""
    return sum(float(value) for key, value in row.items() if key.startswith("tokens/"))


@dataclass(frozen=True, slots=True)
class Standing:
    """One contender over its seeds."""

    label: str
    algorithm: str
    runs: int
    """Runs without an error."""
    failed: int
    success: Quartiles | None
    mean_return: Quartiles | None
    tokens: Quartiles | None
    seconds: Quartiles | None
    scored: int | None = None
    """Problems that `success` is the mean of, over all seeds; None where one did not record it."""
    problems: int | None = None
    failed_episodes: int | None = None
    returns: Mapping[str, Quartiles] | None = None
    """By seat, where one wins what the others lose."""


def standings(contenders: Sequence[Contender], measured: Sequence[Measured]) -> list[Standing]:
    """Return each contender's medians and quartiles, in the order given."""
    found = []
    for contender in contenders:
        own = [m for m in measured if m.label == contender.label]
        good = [m for m in own if m.error is None]
        apart = is_opposed(contender.recipe.config.environment)
        seats = dict.fromkeys(seat for m in good for seat in m.reward or {})
        found.append(
            Standing(
                contender.label,
                contender.algorithm,
                len(good),
                len(own) - len(good),
                _over(good, lambda m: m.success),
                None if apart else _over(good, lambda m: m.mean_return),
                _over(good, lambda m: m.tokens),
                _over(good, lambda m: m.seconds),
                _total([m.scored for m in good]),
                _total([m.problems for m in good]),
                _total([m.failed for m in good]),
                {
                    seat: quartiles([m.reward[seat] for m in good if m.reward and seat in m.reward])
                    for seat in seats
                }
                if apart
                else None,
            )
        )
    return found


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def _over(measured: Sequence[Measured], of: Callable[[Measured], float | None]) -> Quartiles | None:
    values = [value for value in map(of, measured) if value is not None]
    return quartiles(values) if values else None


def table(found: Sequence[Standing]) -> list[str]:
    """Return the standings as lines: median [first quartile, third quartile].

    Where no run has a success, as with reward functions that pay anything, it has no column: `played` counts the problems that
    returns are the mean of.
    """
    seats = list(dict.fromkeys(seat for s in found for seat in s.returns or {}))
    paid = [f"return {seat}" for seat in seats] or ["return"]
    solved = has_success(found)
    head = [
        "algorithm",
        "seeds",
        *(["success", "scored"] if solved else ["played"]),
        *paid,
        "tokens",
        "seconds",
    ]
    rows = [
        [
            s.label,
            f"{s.runs} of {s.runs + s.failed}" if s.failed else f"{s.runs}",
            *([spread_text(s.success)] if solved else []),
            _counted(s, solved=solved),
            *([spread_text((s.returns or {}).get(seat)) for seat in seats] or [spread_text(s.mean_return)]),
            "–" if s.tokens is None else f"{s.tokens.median:.0f}",
            "–" if s.seconds is None else f"{s.seconds.median:.1f}",
        ]
        for s in found
    ]
    widths = [max(len(row[k]) for row in [head, *rows]) for k in range(len(head))]
    return [
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [head, *rows]
    ]


def has_success(found: Sequence[Standing]) -> bool:
    """Return whether any contender has a success, or none has a return to tell it by."""
    return any(s.success is not None for s in found) or not any(s.mean_return or s.returns for s in found)


def legend(found: Sequence[Standing]) -> str:
    """Return what the columns of `table` are."""
    told = "success (over the problems that were scored) and return" if has_success(found) else "return"
    return f"median [quartiles] over seeds: {told} on unseen problems, tokens sampled to train"


def _counted(standing: Standing, *, solved: bool) -> str:
    """Return what the numbers are the mean of: `1498 of 1500, 2 failed`, or a dash for runs without a record of it."""
    problems, failed = standing.problems, standing.failed_episodes or 0
    count = standing.scored if solved or problems is None else problems - failed
    if count is None or problems is None:
        return "–"
    return f"{count} of {problems}" + (f", {failed} failed" if failed else "")


def spread_text(spread: Quartiles | None) -> str:
    """Return `0.950 [0.900, 1.000]`: median and quartiles, or a dash for what was not measured."""
    return "–" if spread is None else f"{spread.median:.3f} [{spread.low:.3f}, {spread.high:.3f}]"


def write_results(
    folder: Path, recipe: str, contenders: Sequence[Contender], measured: Sequence[Measured]
) -> dict[str, Json]:
    """Write `compare.json` and `compare.csv`, and return what the first holds."""
    training = contenders[0].recipe.config.training
    result: dict[str, Json] = {
        "recipe": recipe,
        "budget": {
            **({"steps": training.steps} if training.epochs is None else {"epochs": training.epochs}),
            "tasks_per_step": training.tasks_per_step,
            "episodes_per_task": contenders[0].build().attempts,
        },
        "contenders": [asdict(standing) for standing in standings(contenders, measured)],
        "runs": [asdict(m) | {"mean_return": m.mean_return} for m in measured],
    }
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    agents = list(dict.fromkeys(agent for m in measured for agent in m.reward or {}))
    rewards = [f"return/{agent}" for agent in agents]
    counts = ["scored", "problems", "failed"]
    writer.writerow(["label", "seed", "success", *counts, "return", *rewards, "tokens", "seconds", "error"])
    for m in measured:
        paid: dict[str, Any] = dict(m.reward or {})
        own = [paid.get(agent) for agent in agents]
        scores = [m.success, m.scored, m.problems, m.failed]
        writer.writerow([m.label, m.seed, *scores, m.mean_return, *own, m.tokens, m.seconds, m.error])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "compare.csv", text.getvalue().encode())
        replace_file(folder / "compare.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    return result


Curve = Mapping[int, Quartiles]
"""Step → the spread over seeds."""


def curves(runs: Sequence[Run], value: Callable[[Run], Mapping[int, float]]) -> dict[str, Curve]:
    """Return each label's curve of `value`, over the seeds that have reached each step."""
    found: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        if is_run(run.path):
            for step, number in value(run).items():
                found.setdefault(run.label, {}).setdefault(step, []).append(number)
    return {
        label: {step: quartiles(numbers) for step, numbers in sorted(steps.items())}
        for label, steps in found.items()
    }


def held_out(run: Run, seat: str | None = None) -> dict[int, float]:
    """Return the score of every evaluation: success, or the mean return (of one seat) where there is no success."""
    scores = {}
    for row in read_evaluations(run.path):
        paid = [value for name, value in row["reward"].items() if seat in {None, name}]
        score = row["success"] if row["success"] is not None else fmean(paid) if paid else None
        if score is not None:
            scores[int(row["step"])] = float(score)
    return scores


def unscored(runs: Sequence[Run]) -> dict[str, str]:
    """Return `scored 480 of 500` by label, over all evaluations, where a curve leaves out some of its problems."""
    counts: dict[str, list[int]] = {}
    for run in runs:
        for row in read_evaluations(run.path) if is_run(run.path) else []:
            if row["success"] is not None and "scored" in row:
                total = counts.setdefault(run.label, [0, 0])
                total[0] += row["scored"]
                total[1] += row["problems"]
    return {
        label: f"scored {scored} of {played}" for label, (scored, played) in counts.items() if scored < played
    }


def seats_of(runs: Sequence[Run]) -> list[str]:
    """Return the seats that evaluations have recorded returns of."""
    rows = [row for run in runs if is_run(run.path) for row in read_evaluations(run.path)]
    return list(dict.fromkeys(seat for row in rows for seat in row["reward"]))


def sampled(run: Run, seat: str | None = None) -> dict[int, float]:
    """Return the score of every training step's episodes as sampled (of one seat where there is no success)."""
    scores = {}
    for row in read_metrics(run.path):
        paid = [
            v for key, v in row.items() if key.startswith("return/") and seat in {None, key[len("return/") :]}
        ]
        if "success" in row or paid:
            scores[int(row["step"])] = row["success"] if "success" in row else fmean(paid)
    return scores


# -------- The picture of a comparison: medians over seeds with their interquartile bands, step by step.
#
# Needs matplotlib (`pip install 'kapelle[plot]'`), which is imported when something is drawn.


MISSING = "matplotlib is missing. pip install 'kapelle[plot]'"


def can_draw() -> bool:
    """Return whether matplotlib is there, without importing it."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # its entry among the loaded modules is None
        return False


FORMATS = ("pdf", "png", "svg")
"""What figures are written as, by the ending of the file."""


@contextmanager
def figure_file(*paths: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure that is written to `paths` when the block ends, as PDF, PNG or SVG: the same figure, the same bytes.

    `size` is in inches. Raises ConfigError where matplotlib is missing.
    """
    if not can_draw():
        raise ConfigError(f"Nothing was drawn: {MISSING}")
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Ids in the file are hashes; without a salt of our own they would differ from run to run. Type 42 is what publishers take.
    with mpl.rc_context({"svg.hashsalt": "kapelle", "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        # Laid out once: each further drawing would move things a little, and the files would differ.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for path in paths:
            form = path.suffix.lower().lstrip(".") or "svg"
            moment = {"pdf": "CreationDate", "png": "Software", "svg": "Date"}[form]
            figure.savefig(path, format=form, dpi=300, metadata={moment: None})


def draw(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Curve]],
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write an SVG with one panel for each entry (its title → label → curve); `notes` are appended to labels.

    The same curves give the same bytes. Raises ConfigError where matplotlib is missing.
    """
    with figure_file(path, size=(5 * len(panels) + 1.5, 3.6)) as figure:
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


COLORS = 10
"""Number of colours; after them they repeat with another stroke."""
STROKES = ("-", "--", ":", "-.")
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
            marker="o" if len(steps) <= FEW else "",
        )
        low, high = [curve[s].low for s in steps], [curve[s].high for s in steps]
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
