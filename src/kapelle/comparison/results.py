"""What a comparison came to: each run's last evaluation, and medians with quartiles over the seeds of each contender.

`compare.json` holds `recipe`, `budget` (steps, tasks per step, episodes per task), `contenders` (label, algorithm and
what was measured over their seeds) and `runs`. Numbers that do not exist are null; a run that failed or has not ended
says so under `error`, and counts in no median.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kapelle.comparison.contenders import Contender, Run
from kapelle.durable import explain, replace_file
from kapelle.errors import RunDirectoryError
from kapelle.run_files import is_run, read_evaluations, read_metrics
from kapelle.statistics import Quartiles, quartiles
from kapelle.types import Json

UNFINISHED = "not finished"


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
    """After training, on tasks that nothing was trained on, in [0, 1]; None where the environment knows no success."""
    reward: Mapping[str, float] | None = None
    """Each agent's mean undiscounted return there."""
    tokens: float | None = None
    """Completion tokens sampled for training, by all agents."""
    seconds: float | None = None
    """Wall time of the training steps, which neighbours on the machine lengthen."""

    @property
    def mean_return(self) -> float | None:
        """Mean over agents; it says nothing where one wins what the others lose."""
        return fmean(self.reward.values()) if self.reward else None


def measure(run: Run, folder: Path) -> Measured:
    """Return what a run directory says of its run."""
    place = run.path.relative_to(folder).as_posix()
    if not run.done:
        failed = run.error_file.is_file()
        error = run.error_file.read_text("utf-8").partition("\n")[0] if failed else UNFINISHED
        return Measured(run.label, run.seed, place, error)
    rows = read_metrics(run.path)
    last = read_evaluations(run.path)[-1]
    return Measured(
        run.label,
        run.seed,
        place,
        None,
        last["success"],
        last["reward"],
        sum(value for row in rows for key, value in row.items() if key.startswith("tokens/")),
        sum(row["time/step"] for row in rows),
    )


@dataclass(frozen=True, slots=True)
class Standing:
    """One contender over its seeds."""

    label: str
    algorithm: str
    runs: int
    """Those that ended well."""
    failed: int
    success: Quartiles | None
    mean_return: Quartiles | None
    tokens: Quartiles | None
    seconds: Quartiles | None


def standings(contenders: Sequence[Contender], measured: Sequence[Measured]) -> list[Standing]:
    """Return each contender's medians and quartiles, in the order given."""
    found = []
    for contender in contenders:
        own = [m for m in measured if m.label == contender.label]
        good = [m for m in own if m.error is None]
        found.append(
            Standing(
                contender.label,
                contender.algorithm,
                len(good),
                len(own) - len(good),
                _over(good, lambda m: m.success),
                _over(good, lambda m: m.mean_return),
                _over(good, lambda m: m.tokens),
                _over(good, lambda m: m.seconds),
            )
        )
    return found


def _over(measured: Sequence[Measured], of: Callable[[Measured], float | None]) -> Quartiles | None:
    values = [value for value in map(of, measured) if value is not None]
    return quartiles(values) if values else None


def table(found: Sequence[Standing]) -> list[str]:
    """Return the standings as lines: median [first quartile, third quartile]."""
    head = ["algorithm", "seeds", "success", "return", "tokens", "seconds"]
    rows = [
        [
            s.label,
            f"{s.runs} of {s.runs + s.failed}" if s.failed else f"{s.runs}",
            spread_text(s.success),
            spread_text(s.mean_return),
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
            "steps": training.steps,
            "tasks_per_step": training.tasks_per_step,
            "episodes_per_task": contenders[0].build().attempts,
        },
        "contenders": [asdict(standing) for standing in standings(contenders, measured)],
        "runs": [asdict(m) | {"mean_return": m.mean_return} for m in measured],
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / "compare.csv", _csv(measured).encode())
        replace_file(folder / "compare.json", (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise RunDirectoryError(f"Cannot write {error.filename or folder}: {explain(error)}") from error
    return result


def _csv(measured: Sequence[Measured]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    agents = list(dict.fromkeys(agent for m in measured for agent in m.reward or {}))
    rewards = [f"return/{agent}" for agent in agents]
    writer.writerow(["label", "seed", "success", "return", *rewards, "tokens", "seconds", "error"])
    for m in measured:
        paid: dict[str, Any] = dict(m.reward or {})
        own = [paid.get(agent) for agent in agents]
        writer.writerow([m.label, m.seed, m.success, m.mean_return, *own, m.tokens, m.seconds, m.error])
    return text.getvalue()


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


def held_out(run: Run) -> dict[int, float]:
    """Return the score of every evaluation: success, or the mean return where nothing is solved or not."""
    scores = {}
    for row in read_evaluations(run.path):
        paid = list(row["reward"].values())
        score = row["success"] if row["success"] is not None else fmean(paid) if paid else None
        if score is not None:
            scores[int(row["step"])] = float(score)
    return scores


def sampled(run: Run) -> dict[int, float]:
    """Return the score of every training step's episodes, as they were sampled."""
    scores = {}
    for row in read_metrics(run.path):
        paid = [value for key, value in row.items() if key.startswith("return/")]
        if "success" in row or paid:
            scores[int(row["step"])] = row["success"] if "success" in row else fmean(paid)
    return scores
