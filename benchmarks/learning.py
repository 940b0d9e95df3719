"""Does each algorithm learn? Games with known optima, five seeds, tiny budgets, over `kapelle compare`'s machinery.

    python -m benchmarks.learning --games xor,climbing --algorithms grpo,qmix --jobs 1

Runs lie under `runs/learning`, where what is done is not done again; the table, `learning.json` and one SVG a game are
written to `benchmarks/results`. Kuhn poker is measured by NashConv, computed exactly from the agents' own probabilities.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from kapelle.cli.quiet import hush
from kapelle.comparison.contenders import plan, read_contenders, read_own
from kapelle.comparison.results import Measured, spread_text, standings
from kapelle.comparison.running import RunningComparison, train_all
from kapelle.errors import ConfigError
from kapelle.functional.statistics import Quartiles, quartiles
from kapelle.setup.recipe import Recipe, lay_over

RESULTS = Path(__file__).with_name("results")
GAMES = Path(__file__).with_name("learning_games.yaml")
RUNS = Path("runs/learning")


def games() -> dict[str, dict[str, Any]]:
    """Return every game: its recipe, rows (label → algorithm) and settings of single rows."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(GAMES.read_text("utf-8"))
    return {name: values for name, values in found.items() if not name.startswith("_")}


def recipe_of(name: str, game: Mapping[str, Any]) -> Recipe:
    """Return a game's recipe, checked."""
    return lay_over([(GAMES.name, {"name": name, **game["recipe"]})])


def comparison_of(name: str, labels: Sequence[str] | None, seeds: int) -> RunningComparison | None:
    """Return what is compared on a game: all its rows or those of `labels`; None when it has none of them."""
    game = games()[name]
    rows = [
        f"{label}={algorithm}" for label, algorithm in game["rows"].items() if not labels or label in labels
    ]
    if not rows:
        return None
    named = [row.partition("=")[0] for row in rows]
    own = [
        f"{label}:{setting}"
        for label, settings in game["own"].items()
        for setting in settings
        if label in named
    ]
    contenders = read_contenders(recipe_of(name, game), rows, read_own(own))
    return RunningComparison(name, contenders, plan(contenders, seeds, RUNS / name), RUNS / name)


def nash_conv(path: Path) -> float:
    """Return NashConv of the team that a run has trained (uniform play of Kuhn poker: 0.9167)."""
    from kapelle.rollout.evaluation.exploitability import evaluate_table, language_table
    from kapelle.training.trainer import Trainer

    with Trainer.from_run(path) as trainer:
        table = language_table(trainer.setup, trainer.engine.score)
        return evaluate_table(trainer.setup.environment, table).nash_conv


def result_of(comparison: RunningComparison) -> dict[str, Any]:
    """Return what a comparison came to as plain JSON, with exact numbers where a game has them."""
    measured = comparison.measure()
    found = standings(comparison.contenders, measured)
    result = comparison.write() | {"contenders": [asdict(standing) for standing in found]}
    for run in result["runs"]:
        run.pop("path")
    if games()[comparison.name].get("exact"):
        _add_exact(comparison, measured, result)
    return result


def _add_exact(comparison: RunningComparison, measured: Sequence[Measured], result: dict[str, Any]) -> None:
    values: dict[str, list[float]] = {}
    for m, run in zip(measured, result["runs"], strict=True):
        if m.error is None:
            run["nash_conv"] = nash_conv(comparison.folder / m.path)
            values.setdefault(m.label, []).append(run["nash_conv"])
    for standing in result["contenders"]:
        own = values.get(standing["label"])
        standing["nash_conv"] = asdict(quartiles(own)) if own else None


def table(results: Mapping[str, Any]) -> list[str]:
    """Return all results as one Markdown table."""
    lines = [
        "| game | row | algorithm | seeds | success | return | NashConv | tokens | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for game, result in results.items():
        for row in result["contenders"]:
            cells = [_cell(row.get(key)) for key in ("success", "mean_return", "nash_conv")]
            ends = [f"{row[key]['median']:.0f}" if row[key] else "–" for key in ("tokens", "seconds")]
            seeds = f"{row['runs']} of {row['runs'] + row['failed']}" if row["failed"] else str(row["runs"])
            lines.append(
                " | ".join([f"| {game}", row["label"], row["algorithm"], seeds, *cells, *ends]) + " |"
            )
    return lines


def _cell(value: Mapping[str, float] | None) -> str:
    return spread_text(None if value is None else Quartiles(**value))


def run(
    names: Sequence[str] = (), labels: Sequence[str] | None = None, seeds: int = 5, processes: int = 1
) -> dict[str, Any]:
    """Train what is left of the named games (all), write the results of all that is done, and return them."""
    file = RESULTS / "learning.json"
    results: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    RESULTS.mkdir(exist_ok=True)
    for name in names or games():
        comparison = comparison_of(name, labels, seeds)
        if comparison is None:
            continue
        train_all(comparison, processes, lambda line: print(line, file=sys.stderr, flush=True))
        result = result_of(comparison)
        before = results.get(name, {"contenders": [], "runs": []})
        now = {row["label"] for row in result["contenders"]}
        for key in ("contenders", "runs"):
            result[key] = [row for row in before[key] if row["label"] not in now] + result[key]
        order = list(games()[name]["rows"])
        result["contenders"].sort(key=lambda row: order.index(row["label"]))
        results[name] = result
        file.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", "utf-8")
        _draw(comparison)
    return results


def _draw(comparison: RunningComparison) -> None:
    try:
        picture = comparison.draw()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return
    (RESULTS / f"learning-{comparison.name}.svg").write_bytes(picture[0].read_bytes())


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("--games", default="", help=f"of {', '.join(games())} (all)")
    parser.add_argument("--algorithms", default="", help="rows of the games to train (all)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    asked = parser.parse_args(arguments)
    names = [name for name in asked.games.split(",") if name]
    labels = [label for label in asked.algorithms.split(",") if label] or None
    print("\n".join(table(run(names, labels, asked.seeds, asked.jobs))))
    return 0


if __name__ == "__main__":
    hush()
    sys.exit(main(sys.argv[1:]))
