"""Collects the results of a comparison: the last evaluation of each run, and medians with quartiles over the seeds of each contender.

The file `compare.json` contains the `recipe`, the `budget` (steps, tasks per step, episodes per task), the `contenders`
(label, algorithm and the results over their seeds) and the `runs`. Missing numbers are null. For a run that failed or
has not finished, the reason is stored under `error`, and the run is excluded from the medians. The value of `success`
is the mean over the `scored` episodes of the last evaluation (out of `problems`). Episodes that failed or were not
scored are excluded. In games in which one role wins what other roles lose, a mean over roles is meaningless. For such
games, `returns` holds the return of each role.
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
from kapelle.environment import report_of
from kapelle.errors import ConfigError
from kapelle.functional.statistics import Quartiles, quartiles
from kapelle.runs.reader import read_evaluations, read_metrics
from kapelle.runtime.files import replace_file, writing
from kapelle.types import Json

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Measured:
    """The numbers measured for one run."""

    label: str
    seed: int
    path: str
    """The run directory, relative to the folder of the comparison."""
    error: str | None
    """The reason why there are no numbers, or None if there are numbers."""
    success: float | None = None
    """The success rate after training on unseen tasks, in [0, 1], or None if the environment does not define success."""
    reward: Mapping[str, float] | None = None
    """The mean undiscounted return of each agent on the same tasks."""
    tokens: float | None = None
    """The number of completion tokens that all agents sampled for training."""
    seconds: float | None = None
    """The wall time of the training steps in seconds, which depends on other processes on the machine."""
    scored: int | None = None
    """The number of problems over which `success` is computed."""
    problems: int | None = None
    """The number of evaluated problems."""
    failed: int | None = None
    """The number of problems whose episode ended with an error."""
    reason: str = ""
    """The most frequent reason why problems failed or were not scored, and why fewer problems were evaluated than configured."""
    curve: Sequence[Mapping[str, Json]] = ()
    """The results of every evaluation, which contain the `step`, the `tokens` sampled up to the step, `success`, `scored`,
    `problems`, `failed`, and the `reward` of each agent."""

    @property
    def mean_return(self) -> float | None:
        """The mean return over agents, which is meaningless if one agent wins what other agents lose."""
        return fmean(self.reward.values()) if self.reward else None


def measure(run: Run, folder: Path) -> Measured:
    """Return the numbers in the directory of a run."""
    place = run.path.relative_to(folder).as_posix()
    if not run.done:
        failed = run.error_file.is_file()
        error = run.error_file.read_text("utf-8").partition("\n")[0] if failed else "not finished"
        return Measured(run.label, run.seed, place, error)
    rows, evaluations = read_metrics(run.path), read_evaluations(run.path)
    if not evaluations:
        return Measured(run.label, run.seed, place, "its evaluations.jsonl is empty")
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
    """Return how many problems were evaluated and why there were not more, or an empty string if the number is as configured."""
    fewer = evaluation.get("fewer", "")
    return f"evaluated on {evaluation.get('problems')} problems: {fewer}" if fewer else ""


def _tokens(row: Mapping[str, Any]) -> float:
    """Return the number of tokens that all agents sampled in a step."""
    return sum(float(value) for key, value in row.items() if key.startswith("tokens/"))


@dataclass(frozen=True, slots=True)
class Standing:
    """The results of one contender over its seeds."""

    label: str
    algorithm: str
    runs: int
    """The number of runs without an error."""
    failed: int
    success: Quartiles | None
    mean_return: Quartiles | None
    tokens: Quartiles | None
    seconds: Quartiles | None
    scored: int | None = None
    """The number of problems over which `success` is computed, over all seeds, or None if a run has no record of it."""
    problems: int | None = None
    failed_episodes: int | None = None
    returns: Mapping[str, Quartiles] | None = None
    """The returns by role, for games in which one role wins what other roles lose."""


def standings(contenders: Sequence[Contender], measured: Sequence[Measured]) -> list[Standing]:
    """Return the medians and quartiles of each contender, in the given order."""
    found = []
    for contender in contenders:
        own = [m for m in measured if m.label == contender.label]
        good = [m for m in own if m.error is None]
        opposed = report_of(contender.recipe.config.environment).constant_sum
        roles = dict.fromkeys(role for m in good for role in m.reward or {})
        found.append(
            Standing(
                contender.label,
                contender.algorithm,
                len(good),
                len(own) - len(good),
                _over(good, lambda m: m.success),
                None if opposed else _over(good, lambda m: m.mean_return),
                _over(good, lambda m: m.tokens),
                _over(good, lambda m: m.seconds),
                _total([m.scored for m in good]),
                _total([m.problems for m in good]),
                _total([m.failed for m in good]),
                {
                    role: quartiles([m.reward[role] for m in good if m.reward and role in m.reward])
                    for role in roles
                }
                if opposed
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
    """Return the results as lines of a table, where each value is written as median [first quartile, third quartile].

    If no run has a success rate, for example with reward functions, the table has no column for success. Without
    success rates, `played` is the number of problems over which the mean returns are computed.
    """
    roles = list(dict.fromkeys(role for s in found for role in s.returns or {}))
    returns = [f"return {role}" for role in roles] or ["return"]
    solved = has_success(found)
    counts = ["success", "scored"] if solved else ["played"]
    head = ["algorithm", "seeds", *counts, *returns, "tokens", "seconds"]
    rows = [
        [
            s.label,
            f"{s.runs} of {s.runs + s.failed}" if s.failed else f"{s.runs}",
            *([spread_text(s.success)] if solved else []),
            _counted(s, solved=solved),
            *([spread_text((s.returns or {}).get(role)) for role in roles] or [spread_text(s.mean_return)]),
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
    """Return whether any contender has a success rate, or no contender has a return."""
    return any(s.success is not None for s in found) or not any(s.mean_return or s.returns for s in found)


def legend(found: Sequence[Standing]) -> str:
    """Return a description of the columns of `table`."""
    scores = "success (over the problems that were scored) and return" if has_success(found) else "return"
    return f"median [quartiles] over seeds: {scores} on unseen problems, tokens sampled to train"


def _counted(standing: Standing, *, solved: bool) -> str:
    """Return the number of problems in the means, such as `1498 of 1500, 2 failed`, or a dash if the number is unknown."""
    problems, failed = standing.problems, standing.failed_episodes or 0
    count = standing.scored if solved or problems is None else problems - failed
    if count is None or problems is None:
        return "–"
    return f"{count} of {problems}" + (f", {failed} failed" if failed else "")


def spread_text(spread: Quartiles | None) -> str:
    """Format the median and the quartiles, for example as `0.950 [0.900, 1.000]`; None is formatted as a dash."""
    return "–" if spread is None else f"{spread.median:.3f} [{spread.low:.3f}, {spread.high:.3f}]"


def write_results(
    folder: Path, recipe: str, contenders: Sequence[Contender], measured: Sequence[Measured]
) -> dict[str, Json]:
    """Write `compare.json` and `compare.csv`, and return the content of `compare.json`."""
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
        own = [(m.reward or {}).get(agent) for agent in agents]
        scores = [m.success, m.scored, m.problems, m.failed]
        writer.writerow([m.label, m.seed, *scores, m.mean_return, *own, m.tokens, m.seconds, m.error])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "compare.csv", text.getvalue().encode())
        replace_file(folder / "compare.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    return result


# -------- Figures, which need matplotlib (`pip install 'kapelle[plot]'`)

MISSING = "The figure needs matplotlib. Run `pip install 'kapelle[plot]'`."


def can_draw() -> bool:
    """Return whether matplotlib is installed, without importing it."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # its entry in `sys.modules` is None
        return False


FORMATS = ("pdf", "png", "svg")
"""The formats of figures, each of which is also the suffix of the file."""


@contextmanager
def figure_file(*paths: Path, size: tuple[float, float]) -> Iterator[Figure]:
    """Yield a figure that is written to `paths` when the block ends, as PDF, PNG or SVG.

    The same figure always results in the same bytes. The `size` is given in inches. Raises ConfigError without
    matplotlib.
    """
    if not can_draw():
        raise ConfigError(MISSING)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Ids in the file are hashes, and the salt makes them reproducible. Publishers require Type 42 fonts.
    with mpl.rc_context({"svg.hashsalt": "kapelle", "svg.fonttype": "none", "pdf.fonttype": 42}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        # The layout is computed only once: each further drawing would move elements slightly, and the files would differ.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        for path in paths:
            form = path.suffix.lower().lstrip(".") or "svg"
            moment = {"pdf": "CreationDate", "png": "Software", "svg": "Date"}[form]
            figure.savefig(path, format=form, dpi=300, metadata={moment: None})
