"""Implements `kapelle.arena`: matches between named players, whose results are stored in a folder so that the arena can be resumed.

    import kapelle

    print(kapelle.arena("runs/mine", "runs/mine@best", "nash", environment="kuhn_poker", games=200))

The module `comparison.contestants` finds and loads players by name. The module `evaluation.arena` rolls out the games
of a pair and creates the tables.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from kapelle.comparison.contestants import Entries, enter, load
from kapelle.comparison.processes import in_processes
from kapelle.comparison.results import figure_file
from kapelle.environment import report_of
from kapelle.errors import ConfigError, DataError, EngineError, OutputError
from kapelle.rollout.evaluation.arena import Arena, Encounter, meet, pairs_of
from kapelle.rollout.evaluation.evaluate import why_fewer
from kapelle.runtime.event_loop import run_async
from kapelle.runtime.files import replace_file
from kapelle.settings.messages import in_python
from kapelle.setup.problems import choose_tasks
from kapelle.types import Json, Task

SETTINGS, PAIRS = "settings.json", "pairs"
"""The names in the folder of an arena: the file with its settings, and the folder with a file for each finished pair."""
GAMES = 100
"""The default number of deals per pair."""

Report = Callable[[str], None]


@in_python()
def arena(
    *players: str,
    environment: str | None = None,
    settings: Sequence[str] = (),
    games: int = GAMES,
    jobs: int = 1,
    seed: int = 0,
    output: str | Path | None = None,
    report: Report = lambda _: None,
) -> Arena:
    """Roll out `games` deals for every pair of players in every assignment of players to roles, and return the results.

    A player is a run (`RUN`, `RUN@best`, `RUN@12`), the folder or hub name of a model or PEFT adapter, an
    OpenAI-compatible server (`http://HOST/v1#MODEL`) or a player of the environment (`nash`, `mcts(simulations=200)`).
    With `NAME=PLAYER`, a player gets another name. The argument `environment` is the name of an environment, a recipe
    or an OpenSpiel game; the default is the environment of the first run. The argument `settings` may contain
    `environment.key=value` and settings of `team.sampling`, `episode`, `engine` and `model`. All pairs play the same
    deals. If `output` is given, the results are stored in that folder, and a second call with the same folder rolls out
    only missing pairs. At most `jobs` pairs run at the same time, each in its own process. Raises the errors defined in
    `errors.py`.
    """
    for name, value, least in (("games", games, 1), ("jobs", jobs, 1), ("seed", seed, 0)):
        if type(value) is not int or value < least:
            raise ConfigError(f"`{name}` is {value!r}. Use an integer of at least {least}.")
    if isinstance(settings, str):
        raise ConfigError(
            f"`settings` is the string {settings!r}. Pass a list of strings: settings=[{settings!r}]."
        )
    entries = enter(players, environment, settings)
    for note in entries.notes:
        report(note)
    with ExitStack() as closing:
        if output is None:
            output = closing.enter_context(TemporaryDirectory(prefix="kapelle-arena-"))
        folder = Path(output)
        tasks = choose_tasks(entries.config.environment, "test", games)
        about = {
            "environment": entries.config.environment.model_dump(mode="json"),
            "model": entries.config.model.model_dump(mode="json", include={"dtype", "quantization"}),
            "compaction": entries.config.episode.model_dump(mode="json")["compaction"],
            "workflow": entries.config.workflow.model_dump(mode="json"),
            "sampling": entries.config.team.sampling.model_dump(mode="json"),
            "seats": list(entries.names),
            "games": games,
            "seed": seed,
            "tasks": _digest(tasks),
        }
        _keep_settings(folder, about, {entry.label: entry.identity for entry in entries.players})
        pairs = pairs_of([entry.label for entry in entries.players], entries.config.environment)
        met = {pair: _read(folder, pair, len(tasks)) for pair in pairs if _file(folder, pair).is_file()}
        left = [pair for pair in pairs if pair not in met]
        if met:
            report(f"{len(met)} of {len(pairs)} pairs are already finished")
        if left and jobs == 1:
            play_one = _player(entries, tasks, seed, folder, report, closing)
            for pair in left:
                met[pair] = play_one(pair)
                report(_line(met[pair], len(met), len(pairs)))
        elif left:
            work = [
                (tuple(players), environment, tuple(settings), games, seed, str(folder), pair)
                for pair in left
            ]
            for number, failure in in_processes(play_pair, work, min(jobs, len(left))):
                if failure is not None:
                    raise EngineError(f"{' and '.join(left[number])}: {failure.reason}")
                met[left[number]] = _read(folder, left[number], len(tasks))
                report(_line(met[left[number]], len(met), len(pairs)))
        result = Arena(
            environment=entries.game,
            seats=len(entries.names),
            deals=len(tasks),
            seed=seed,
            labels=tuple(entry.label for entry in entries.players),
            players={entry.label: entry.about for entry in entries.players},
            meetings={(each.one, each.other): each for each in (met[pair] for pair in pairs)},
            opposed=report_of(entries.config.environment).constant_sum,
        )
        fewer = why_fewer(entries.config.environment, "test", games, len(tasks))
        if fewer:
            report(f"{len(tasks)} deals: {fewer}")
        _write_results(folder, result)
        return result


def _player(
    entries: Entries, tasks: Sequence[Task], seed: int, folder: Path, report: Report, closing: ExitStack
) -> Callable[[tuple[str, str]], Encounter]:
    """Load all players, and return a function that rolls out and stores a pair.

    The engine and the environments are closed together with `closing`.
    """
    loaded = load(entries, report)
    closing.callback(loaded.setup.engine.close)
    closing.callback(loaded.setup.close)

    def play_one(pair: tuple[str, str]) -> Encounter:
        both = loaded.contestants[pair[0]], loaded.contestants[pair[1]]
        meeting = run_async(lambda: meet(loaded.setup, entries.names, both, tasks, seed))
        replace_file(_file(folder, pair), json.dumps(meeting.row()).encode("ascii") + b"\n")
        return meeting

    return play_one


_loaded: dict[tuple[Any, ...], Callable[[tuple[str, str]], Encounter]] = {}
"""The function with which a worker process rolls out a pair; it keeps all players in memory."""


def play_pair(
    players: tuple[str, ...],
    environment: str | None,
    settings: tuple[str, ...],
    games: int,
    seed: int,
    folder: str,
    pair: tuple[str, str],
) -> None:
    """Roll out and store one pair of players. This function is executed in a worker process."""
    key = (players, environment, settings, games, seed, folder)
    if key not in _loaded:
        entries = enter(players, environment, settings)
        tasks = choose_tasks(entries.config.environment, "test", games)
        # Everything is closed when the process ends.
        _loaded[key] = _player(entries, tasks, seed, Path(folder), lambda _: None, ExitStack())
    _loaded[key](pair)


def _line(meeting: Encounter, done: int, of: int) -> str:
    known = [pair for pair in meeting.deals if pair is not None]
    means = " to ".join(f"{fmean(side):+.3f}" for side in zip(*known, strict=True)) if known else "no result"
    failed = f", {meeting.failed} episodes failed: {meeting.reason}" if meeting.failed else ""
    return f"{meeting.one} – {meeting.other}: {means} in {len(known)} deals{failed}  ({done} of {of})"


# -------- The folder


def _file(folder: Path, pair: tuple[str, str]) -> Path:
    """Return the path of the results file of a pair, which does not depend on the order of the players."""
    names = sorted(quote(label, safe="@-_., ()=") for label in pair)
    name = "~".join(names)
    if len(name) > 200:
        name = blake2b(name.encode(), digest_size=16).hexdigest()
    return folder / PAIRS / f"{name}.json"


def _keep_settings(folder: Path, about: Mapping[str, Json], players: Mapping[str, str]) -> None:
    """Create the folder. Raises ConfigError if the folder holds another arena or different players with the same names."""
    file = folder / SETTINGS
    kept: dict[str, Any] = {**about, "players": {}}
    if file.is_file():
        try:
            kept = json.loads(file.read_bytes())
            before = {str(key): kept["players"][key] for key in kept["players"]}
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{file} cannot be read: {error}. Use another --output.") from error
        for key, value in about.items():
            if kept.get(key) != value:
                if key == "tasks":
                    raise ConfigError(
                        f"{folder} contains an arena with different tasks. Use another --output, or restore "
                        "the original data."
                    )
                changed = sorted(_differences(key, kept.get(key), value))
                raise ConfigError(
                    f"{folder} contains an arena with different settings: {changed[0]}. Use another --output, "
                    "or restore the original setting."
                )
        for label, identity in players.items():
            if before.get(label, identity) != identity:
                raise ConfigError(
                    f"'{label}' in {folder} was {before[label]}, but is now {identity}. Give the player another name (NAME=PLAYER), or use "
                    "another --output."
                )
    elif folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file, but an arena needs a folder. Use another --output.")
    elif folder.exists() and any(folder.iterdir()):
        raise OutputError(
            f"{folder} contains other files, but an arena needs an empty folder. Use another --output."
        )
    try:
        (folder / PAIRS).mkdir(parents=True, exist_ok=True)
        kept = {**about, **kept, "players": {**kept["players"], **players}}
        replace_file(file, json.dumps(kept, indent=2).encode("ascii") + b"\n")
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}. Use another --output.") from error


def _digest(tasks: Sequence[Task]) -> str:
    """Return a digest of the tasks, which detects that a file of questions has changed."""
    content = json.dumps(
        [[task.id, task.question, task.system, dict(task.data)] for task in tasks], default=str
    )
    return blake2b(content.encode(), digest_size=8).hexdigest()


def _differences(key: str, before: Json, now: Json) -> list[str]:
    """Return a description of each setting that differs, with both values."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            line
            for name in {*before, *now}
            if before.get(name) != now.get(name)
            for line in _differences(f"{key}.{name}", before.get(name), now.get(name))
        ]
    return [f"{key} was {json.dumps(before)}, but is now {json.dumps(now)}"]


def _read(folder: Path, pair: tuple[str, str], deals: int) -> Encounter:
    """Return the results of a pair. Raises DataError if the file of the pair does not hold the given number of deals."""
    file = _file(folder, pair)
    try:
        found = Encounter.of(json.loads(file.read_bytes()))
        labels, count = {found.one, found.other}, len(found.games)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}. Remove it to roll out the pair again.") from error
    if labels != set(pair) or count != deals:
        raise DataError(
            f"{file} contains {count} deals of {' and '.join(sorted(labels))}, not {deals} of "
            f"{' and '.join(pair)}. Remove it to roll out the pair again."
        )
    return found


def _write_results(folder: Path, result: Arena) -> None:
    row = result.row()
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(
        ["player", "opponent", "payoff", "low", "high", "deals", "wins", "draws", "losses", "failed"]
    )
    for one in result.labels:
        for other in result.labels:
            met, payoff = result.meeting(one, other), result.payoff(one, other)
            if met is not None:
                numbers = [payoff.mean, payoff.low, payoff.high, payoff.deals] if payoff else [""] * 4
                counts = met.counts() if one != other else ("", "", "")
                writer.writerow([one, other, *numbers, *counts, met.failed])
    try:
        replace_file(folder / "arena.json", json.dumps(row, indent=2).encode("ascii") + b"\n")
        replace_file(folder / "arena.csv", table.getvalue().encode("utf-8"))
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error.strerror}. Use another --output.") from error


def draw(folder: Path, result: Arena) -> Path:
    """Draw `arena.svg`, with ratings, intervals and the payoff matrix, and return its path. Raises ConfigError without matplotlib."""
    path = folder / "arena.svg"
    count, ranked = len(result.labels), result.ranked
    with figure_file(path, size=(10.5 + 0.3 * count, 2.2 + 0.35 * count)) as figure:
        left, right = figure.subplots(1, 2)
        rows = range(count)
        for k, label in enumerate(ranked):
            if result.elo:
                middle, low, high = result.elo[label]
            else:
                found = result.cross_play(label)
                if found is None:
                    continue
                middle = found.mean
                low = middle if found.low is None else found.low
                high = middle if found.high is None else found.high
            left.errorbar(middle, k, xerr=[[middle - low], [high - middle]], fmt="o", color="C0", capsize=3)
        left.set_yticks(rows, ranked)
        left.invert_yaxis()
        left.set_xlabel("Elo, 95 %" if result.elo else "payoff with the other players, 95 %")
        left.grid(axis="x", alpha=0.3)
        table = [
            [float("nan") if (p := result.payoff(one, other)) is None else p.mean for other in ranked]
            for one in ranked
        ]
        known = [abs(value) for line in table for value in line if value == value]  # noqa: PLR0124 - NaN does not equal itself
        most = max(known, default=1.0) or 1.0
        right.imshow(table, cmap="RdBu", vmin=-most, vmax=most)
        for k, line in enumerate(table):
            for n, value in enumerate(line):
                if value == value:  # noqa: PLR0124
                    ink = "white" if abs(value) > 0.6 * most else "black"
                    right.text(n, k, f"{value:+.2f}", ha="center", va="center", fontsize=7, color=ink)
        right.set_xticks(rows, ranked, rotation=30, ha="right")
        right.set_yticks(rows, ranked)
        right.set_title("payoff of the row's player against the column's player", fontsize="medium")
        figure.suptitle(f"{result.environment}: {result.deals} deals in every role")
    return path
