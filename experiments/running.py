"""Running claims: every arm, rate and seed once, in several processes, and never again what is done."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.claim import Claim, Results, claims, interquartile_mean, overall, summed_up

HERE = Path(__file__).parent
RESULTS = HERE / "results"
RUNS = Path("runs/experiments")


@dataclass(frozen=True)
class Seeds:
    """Which seeds a run of a claim uses."""

    first: int
    """Of the verdict's, which count up from here."""
    sweep: tuple[int, ...]
    """By which rates are chosen; no other run uses them."""
    least: int = 1
    """Seeds of the verdict, also where the claim names fewer."""


FIRST = Seeds(0, (1001, 1002, 1003, 1004, 1005))
REPETITION = Seeds(5000, (6001, 6002, 6003, 6004, 6005), least=10)
EXTENSIONS = 3
"""How often a grid of rates is extended on either side, until an arm's best rate lies inside it."""
POINTS = 25
"""Points of a curve that is kept."""


WORDS = frozenset(
    {
        "algorithms",
        "claim",
        "source",
        "setting",
        "remark",
        "predictions",
        "plot",
        "plotted",
        "logarithmic",
        "landmarks",
        "seeds",
        "one_run",
        "quick",
    }
)
"""What a claim says that changes nothing of what its arms measure."""


def source_of(claim: Claim) -> str:
    """Return a hash of what a claim's arms and measures are, in its own file and in those of claims that it takes from; words, bounds, the number of seeds and imports aside."""
    found, waiting = dict[str, bytes](), [claim.name]
    while waiting:
        name = waiting.pop(0)
        if name not in found:
            tree, found[name] = _measured(HERE / "claims" / f"{name}.py")
            waiting.extend(_siblings(tree))
    return hashlib.sha256(b"".join(found.values())).hexdigest()[:16]


def _measured(file: Path) -> tuple[ast.Module, bytes]:
    """Return a claim's file parsed, and its text without what changes nothing of what is measured."""
    text = file.read_bytes()
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    begins = [sum(map(len, lines[:k])) for k in range(len(lines))]
    cut = [
        (node.lineno, node.end_lineno or node.lineno)
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Claim":
            for keyword in reversed(node.keywords):
                if keyword.arg in WORDS:
                    end = begins[(keyword.end_lineno or 1) - 1] + (keyword.end_col_offset or 0)
                    text = text[: begins[keyword.lineno - 1] + keyword.col_offset] + text[end:].lstrip(
                        b", \n"
                    )
    for first, last in reversed(cut):
        text = text.replace(b"".join(lines[first - 1 : last]), b"", 1)
    return tree, text


def _siblings(tree: ast.Module) -> list[str]:
    """Return the claims from whose files one takes something."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    whole = [each.name for node in imports if node.module == "experiments.claims" for each in node.names]
    parts = [
        node.module.rpartition(".")[2]
        for node in imports
        if (node.module or "").startswith("experiments.claims.") and node.module is not None
    ]
    return sorted({*whole, *parts})


def run_one(name: str, arm: str, rate: float, seed: int) -> dict[str, Any]:
    """Run one arm with one seed; return it as a row."""
    import torch

    torch.set_num_threads(1)
    claim = claims()[name]
    began = time.process_time()
    result = claim.measure(claim.arms[arm], seed, rate)
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "measures": dict(result.measures),
        "curve": [list(point) for point in result.curve],
        "seconds": time.process_time() - began,
    }


class Rows:
    """What was run of a claim, a line of JSON each; lines of another source are not read."""

    def __init__(self, claim: Claim, folder: Path = RUNS) -> None:
        self._file = folder / f"{claim.name}.jsonl"
        self._source = source_of(claim)
        self.known: dict[tuple[str, float, int], dict[str, Any]] = {}
        if self._file.exists():
            for line in self._file.read_text("utf-8").splitlines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue  # written in part when it was stopped
                if row.get("source") == self._source:
                    self.known[row["arm"], row["rate"], row["seed"]] = row

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row."""
        self.known[row["arm"], row["rate"], row["seed"]] = row
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps({**row, "source": self._source}) + "\n")


Job = tuple[str, str, float, int]


def run(
    claim: Claim,
    jobs: int = 1,
    seeds: int | None = None,
    fixed: Mapping[str, float] | None = None,
    folder: Path = RUNS,
    drawn: Seeds = FIRST,
) -> Results:
    """Run what is missing of a claim and return all that is known; `fixed` rates are not chosen again."""
    rows = Rows(claim, folder)
    rates, tried = dict(fixed or {}), dict[str, dict[float, float]]()
    if not rates and len(claim.rates) > 1:
        rates, tried = _chosen(claim, rows, jobs, drawn.sweep)
    rates = {arm: rates.get(arm, claim.rates[0]) for arm in claim.arms}
    count = seeds or max(claim.seeds, drawn.least)
    numbers = range(drawn.first, drawn.first + count)
    wanted = [(claim.name, arm, rates[arm], seed) for seed in numbers for arm in claim.arms]
    _finish(rows, wanted, jobs, "runs", claim.one_run)
    found = {arm: [rows.known[arm, rates[arm], seed] for seed in numbers] for arm in claim.arms}
    swept = [rows.known[arm, rate, seed] for arm in tried for rate in tried[arm] for seed in drawn.sweep]
    return Results(
        claim.name,
        count,
        rates,
        {arm: {f"{rate:g}": worth for rate, worth in own.items()} for arm, own in tried.items()},
        {arm: [row["measures"] for row in own] for arm, own in found.items()},
        {arm: _curve([row["curve"] for row in own]) for arm, own in found.items() if own[0]["curve"]},
        round(sum(row["seconds"] for row in (*swept, *(row for own in found.values() for row in own))), 1),
        json.loads(json.dumps(claim.arms, default=str)),
        source_of(claim),
        {name: importlib.metadata.version(name) for name in ("kapelle", "torch", "numpy")},
        len(drawn.sweep),
    )


def _chosen(
    claim: Claim, rows: Rows, jobs: int, sweep: Sequence[int]
) -> tuple[dict[str, float], dict[str, dict[float, float]]]:
    """Return the rate of each arm, and what every rate came to: the interquartile mean of `chosen_by` over the sweep's seeds.

    An arm whose best rate is the least or the greatest of its grid gets another one beyond it, by the ratio of the last two.
    """
    grids = {arm: sorted(claim.rates) for arm in claim.arms}
    while True:
        wanted = [
            (claim.name, arm, rate, seed) for arm, grid in grids.items() for rate in grid for seed in sweep
        ]
        _finish(rows, wanted, jobs, "rates", claim.one_run)
        tried = {
            arm: {rate: _worth(claim, rows, arm, rate, sweep) for rate in grid} for arm, grid in grids.items()
        }
        rates = {arm: max(worth, key=worth.__getitem__) for arm, worth in tried.items()}
        extended = False
        for arm, grid in grids.items():
            below, above = grid.index(min(claim.rates)), len(grid) - 1 - grid.index(max(claim.rates))
            if rates[arm] == grid[0] and below < EXTENSIONS:
                grid.insert(0, _rounded(grid[0] ** 2 / grid[1]))
                extended = True
            elif rates[arm] == grid[-1] and above < EXTENSIONS:
                grid.append(_rounded(grid[-1] ** 2 / grid[-2]))
                extended = True
        if not extended:
            return rates, tried


def _worth(claim: Claim, rows: Rows, arm: str, rate: float, sweep: Sequence[int]) -> float:
    worth = float(
        interquartile_mean([rows.known[arm, rate, seed]["measures"][claim.chosen_by] for seed in sweep])
    )
    return -math.inf if math.isnan(worth) else worth  # a run that diverges is never the best


def _rounded(rate: float) -> float:
    return float(f"{rate:.2g}")


def _finish(rows: Rows, wanted: Sequence[Job], jobs: int, what: str, together: bool) -> None:
    """Run what is not known yet, all arms of a seed in one process if they are `together`, and say how far it is."""
    missing = [job for job in wanted if job[1:] not in rows.known]
    if not missing:
        return
    began = time.monotonic()
    shares: dict[Any, list[Job]] = {}
    for job in missing:
        shares.setdefault(job[2:] if together else job, []).append(job)
    for done, row in enumerate(_rows_of(list(shares.values()), jobs), 1):
        rows.add(row)
        spent = time.monotonic() - began
        if sys.stderr.isatty() or done == len(missing):
            left = spent / done * (len(missing) - done)
            line = f"{missing[0][0]}: {what} {done} of {len(missing)}, {spent:.0f} s, {left:.0f} s left   "
            print(f"\r{line}", end="\n" if done == len(missing) else "", file=sys.stderr, flush=True)


def _rows_of(shares: Sequence[Sequence[Job]], jobs: int) -> Iterator[dict[str, Any]]:
    if jobs <= 1:
        yield from (run_one(*job) for share in shares for job in share)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for each in as_completed([pool.submit(_run_share, share) for share in shares]):
            yield from each.result()


def _run_share(share: Sequence[Job]) -> list[dict[str, Any]]:
    return [run_one(*job) for job in share]


def _curve(curves: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    """Return the interquartile mean of curves, each of which holds its worth until its next point, and its interval."""
    most = max(curve[-1][0] for curve in curves)
    places = [most * k / (POINTS - 1) for k in range(POINTS)]
    table = [[_at(curve, place) for place in places] for curve in curves]
    columns = [summed_up([row[k] for row in table]) for k in range(POINTS)]
    return [
        [round(place) for place in places],
        *([round(column[j], 4) for column in columns] for j in range(3)),
    ]


def _at(curve: Sequence[Sequence[float]], place: float) -> float:
    return next(worth for tokens, worth in reversed(curve) if tokens <= place)


def keep(results: Results, *, repeated: bool = False) -> Path:
    """Write results where the page is made from; those of a repetition beside the first ones."""
    file = _file(results.name, repeated)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(asdict(results), indent=1, ensure_ascii=False) + "\n", "utf-8")
    return file


def kept(name: str, *, repeated: bool = False) -> Results | None:
    """Return the results of a claim that were kept; None where there are none."""
    file = _file(name, repeated)
    return Results(**json.loads(file.read_text("utf-8"))) if file.exists() else None


def _file(name: str, repeated: bool) -> Path:
    return (RESULTS / "repeated" if repeated else RESULTS) / f"{name}.json"


def turned(claim: Claim, now: Results, before: Results) -> list[str]:
    """Return what no longer holds of predictions that were shown, in a few seeds."""
    return [
        f"{claim.name}: {prediction.says}: {judged.middle:.3g} [{judged.low:.3g}, {judged.high:.3g}], {judged.bound} was shown"
        for prediction, judged, then in zip(
            claim.predictions, now.judge(claim), before.judge(claim), strict=True
        )
        if then.verdict == "shown" and not prediction.holds(judged.middle)
    ]


def verdict_line(claim: Claim, results: Results) -> str:
    """Return a claim's verdict in a line."""
    judged = results.judge(claim)
    return f"{claim.name}: {overall(judged)} ({sum(each.verdict == 'shown' for each in judged)} of {len(judged)} predictions), {results.seconds:.0f} CPU-seconds"
