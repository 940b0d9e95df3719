"""Prepares the content of a run's pages: its row in the list, warnings, the team, the agents that read each other's turns, and settings."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from socket import gethostname
from time import time
from typing import Any

from kapelle.runs.blamed import blame_files
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runs.failure import LOG
from kapelle.runs.findings import read_evaluated, read_notes
from kapelle.runs.pace import pace_of
from kapelle.runs.reader import read_excluded
from kapelle.runs.recorded import all_losses
from kapelle.runs.summary import flat, opposed, plays_against, troubles
from kapelle.runs.verdict import Verdict, judge
from kapelle.runtime.files import check_plain
from kapelle.viewer import curves
from kapelle.viewer.episode import ShownEpisode, step_episodes, witnesses
from kapelle.viewer.library import ViewedRun
from kapelle.viewer.lines import SPLITS, damaged_files, lines_of, mean, number, readable


def at(settings: Mapping[str, Any], *way: str) -> Any:
    """Return the value at a path in nested settings, or None if the path does not exist."""
    found: Any = settings
    for name in way:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def listed(run: ViewedRun) -> dict[str, Any]:
    """Return the row of a run in the list of runs."""
    with run.lock:
        run.refresh()
        settings, status, last = run.settings(), run.status(), run.metrics.last()
        measured, columns = run.measured(), run.metrics.columns
        # The small curve in the list shows success or, if there is none, the first agent's return.
        returns = [column for name, column in columns.items() if name.startswith(("return/", "reward/"))]
        curve = columns.get("success") or (returns[0] if returns else [])
        rewards = _rewards(last, run.agents())
        steps = at(settings, "training", "steps")
        return {
            "key": run.key,
            "name": run.key.replace("~", "/"),
            **status,
            "step": status["step"] if not status["wrong"] else int(run.metrics.axes["step"][-1]) if len(run.metrics) else 0,
            "recipe": str(at(settings, "name") or "?"),
            "algorithm": str(at(settings, "algorithm", "name") or "?"),
            "environment": str(at(settings, "environment", "name") or "?"),
            "seed": at(settings, "seed"),
            "steps": steps if isinstance(steps, int) else 0,
            "agents": run.agents(),
            "cause": failure.cause if (failure := run.failure()) else "",
            "success": last.get("success"),
            "scored": last.get("scored"),
            "rewards": rewards if len(set(rewards.values())) > 1 else {},
            "reward": mean([value for name, value in last.items() if name.startswith("reward/")]),
            "measured": None if measured is None else {"success": measured["success"], "step": measured["step"], "interval": _ends(measured), "parts": _parts(measured)},
            "spark": [value for value in curve if value is not None],
            "damaged": run.damaged,
            "league": plays_against(settings, last, columns),
            "verdict": (found := verdict(run)),
            "remedy": remedy(found, str(status["state"])),
            "panels": {curves.panel_of(name) for name in columns},
            "notes": read_notes(run.path),
            "excluded": read_excluded(run.path),
            "blame": bool(blame_files(run.path)) or ("success" in last and len(run.agents()) > 1 and bool(list_checkpoints(run.path / "checkpoints"))),
        }  # fmt: skip


def _rewards(last: Mapping[str, float], agents: Sequence[str]) -> dict[str, float]:
    """Return the mean reward of each agent in the last step, in the order of the settings. Agents without a reward are omitted."""
    return {agent: last[f"reward/{agent}"] for agent in agents if f"reward/{agent}" in last}


def remedy(found: Verdict, state: str) -> str:
    """Return advice on what to do about a verdict. For a run that ended early, the advice is how to resume the run."""
    if found.word != "young" or state not in ("finished", "stopped"):
        return found.advice.remedy
    if state == "finished":
        return (
            "The run has ended. Train it for longer with `kapelle train --resume RUN training.steps=N`, or "
            "use more tasks per step (`training.tasks_per_step`) in the next run."
        )
    return "The run has stopped: `kapelle train --resume RUN` continues it."


def verdict(run: ViewedRun) -> Verdict:
    """Return the verdict on a run (such as healthy, flat or diverging), which is cached until new rows are read."""
    with run.lock:
        if run.verdict is None or run.verdict[0] != run.edition:
            table, settings = run.metrics, run.settings()
            against = opposed(settings, table.last(), table.columns)
            found = judge(table.axes["step"], table.columns, run.evaluations, opposed=against)
            run.verdict = run.edition, found
        return run.verdict[1]


def pace(run: ViewedRun) -> dict[str, Any] | None:
    """Return the bars of the phases of a step, as percentages and colours, and the sentence about the phase that dominates."""
    with run.lock:
        run.refresh()
        found = pace_of(run.metrics.columns, run.settings())
    if found is None:
        return None
    bars, start = [], 0.0
    for k, (name, share) in enumerate(found.shares.items()):  # the colours of the curve of times
        bars.append({"name": name, "start": 100 * start, "width": 100 * share, "color": k % 7 + 1})
        start += share
    return {"steps": found.steps, "seconds": found.seconds, "bars": bars, "line": found.line()}


def _parts(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each additional rate of an evaluation that was measured, such as the rates of sets and pass@k."""
    parts = measured.get("parts")
    rows = []
    for name, part in parts.items() if isinstance(parts, Mapping) else ():
        success = number(part.get("success")) if isinstance(part, Mapping) else None
        if success is not None:
            low, high = _ends(part) or (success, success)
            rows.append(
                {
                    "name": str(name),
                    "success": success,
                    "low": low,
                    "high": high,
                    "scored": number(part.get("scored")),
                }
            )
    return rows


def _ends(row: Mapping[str, Any]) -> list[float] | None:
    found = row.get("interval")
    ends = [number(end) for end in found] if isinstance(found, list) else []
    return [end for end in ends if end is not None] if len(ends) == 2 and None not in ends else None


def differing(runs: Sequence[ViewedRun]) -> list[dict[str, Any]]:
    """Return the settings in which runs differ, with the value of every run."""
    values = [flat(run.settings()) for run in runs]
    names = dict.fromkeys(name for own in values for name in own)
    rows = [{"name": name, "values": [own.get(name, "–") for own in values]} for name in names]
    return [row for row in rows if len({str(value) for value in row["values"]}) > 1]


def alike(run: ViewedRun) -> str:
    """Return a key that is equal for runs that differ only in their seed and description."""
    settings = flat(run.settings())
    return repr(
        sorted((key, str(value)) for key, value in settings.items() if key not in ("seed", "description"))
    )


LOG_TAIL = 1 << 14
"""The number of bytes at the end of a run's log that are shown on the run's page."""


def ended(run: ViewedRun) -> dict[str, Any] | None:
    """Return why a run failed or was killed, how to resume the run, its failed episodes, and the end of its log.

    The result is None for all other runs.
    """
    failure = run.failure()
    if failure is None:
        return None
    log = b""
    with suppress(OSError):
        path = run.path / LOG
        check_plain(path, path.stat().st_mode)
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL))
            log = file.read(LOG_TAIL)
    episodes = [
        {**asdict(each), "split": next((s for s in SPLITS if lines_of(run.path, s, each.step)), None)}
        for each in failure.episodes
    ]
    return {
        "failure": failure,
        "episodes": episodes,
        "log": log.decode(errors="replace"),
        "resume": shlex.join(["kapelle", "train", "--resume", str(run.path)]),
    }


SILENT = 3600
"""The number of seconds without a change after which a run on another host may have ended."""


def _silent(run: ViewedRun, status: Mapping[str, Any]) -> str:
    """Return a message about a run on another host that has not written anything for a while, or an empty string for other runs."""
    with suppress(ValueError, OSError):
        changed = max(
            datetime.fromisoformat(status["updated"]).timestamp(),
            *(path.stat().st_mtime for path in (run.path / "metrics.jsonl", run.path / LOG) if path.exists()),
        )
        if status["state"] == "running" and status["host"] != gethostname() and time() - changed > SILENT:
            when = datetime.fromtimestamp(changed, UTC).strftime("%Y-%m-%d %H:%M")
            return (
                f"nothing has been written since {when} UTC: the run may have ended on {status['host']}, but this "
                "cannot be checked from this host"
            )
    return ""


def warnings(run: ViewedRun) -> list[str]:
    """Return messages about problems in the steps of a run, and about parts of its files that cannot be shown."""
    with run.lock:
        run.refresh()
        lines = troubles(run.metrics.axes["step"], run.metrics.columns)

        def counted(count: int, word: str) -> str:
            return f"{count:,} {word}{'' if count == 1 else 's'}"

        status, table, faults = run.status(), run.metrics, damaged_files(run.path)
        wrong, silent = status["wrong"], _silent(run, status)
        file = run.path / "metrics.jsonl"
        unread = (file.is_symlink() or file.exists()) and not readable(file)
        found = [
            (wrong, wrong),
            (silent, silent),
            (not run.settings(), "config.yaml cannot be read, so the settings are unknown"),
            (unread, "metrics.jsonl cannot be read, so no curve is drawn"),
            (table.disordered, f"metrics.jsonl has {counted(table.disordered, 'row')} out of order or duplicated; curves show the last row of a step"),
            (table.endless, f"metrics.jsonl has {counted(table.endless, 'non-finite number')}; curves have gaps there"),
            (run.damaged, f"the run's tables have {counted(run.damaged, 'damaged line')}, which cannot be shown"),
            (faults, f"the run has {counted(len(faults), 'damaged episode file')}, so some episodes are missing here: {', '.join(faults[:3])}"),
        ]  # fmt: skip
        return [*lines, *(str(line) for holds, line in found if holds), *all_losses(run.path)]


def settings_rows(run: ViewedRun) -> list[dict[str, Any]]:
    """Return every resolved setting with its origin, and whether the value differs from the default."""
    origin = run.origin()
    return [
        {
            "name": name,
            "value": value,
            "origin": str(origin.get(name, "default")),
            "own": str(origin.get(name, "default")) != "default",
        }
        for name, value in flat(run.settings()).items()
    ]


def compared(run: ViewedRun) -> dict[str, Any] | None:
    """Return the most recent `kapelle eval` of a run.

    The evaluation compares the team, single agents and majority votes, with equal numbers of tokens.
    """
    for row in reversed(read_evaluated(run.path)):
        team, others = row.get("team"), row.get("baselines")
        if not isinstance(team, Mapping) or number(team.get("success")) is None:
            continue
        found = [_measured("the team", team)]
        for other in others if isinstance(others, list) else []:
            if isinstance(other, Mapping) and number(other.get("success")) is not None:
                agents, answers = other.get("agents"), other.get("answers")
                names = ", ".join(map(str, agents)) if isinstance(agents, list) else "?"
                kind = f"{names} alone" if answers == 1 else f"{names}, majority of {answers} answers"
                found.append(_measured(kind, other))
        settings = row.get("settings")
        return {
            "rows": found, "step": number(row.get("steps")), "time": str(row.get("time") or "")[:16].replace("T", " "),
            "settings": " ".join(map(str, settings)) if isinstance(settings, list) else "",
        }  # fmt: skip
    return None


def _measured(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    success, ends = number(row.get("success")) or 0.0, _ends(row)
    low, high = ends or (success, success)
    return {
        "name": name, "success": success, "low": low, "high": high, "tokens": number(row.get("tokens")), "scored": number(row.get("scored")),
        "bar": [round(100 * min(1.0, max(0.0, value)), 1) for value in (low, success, high)],
    }  # fmt: skip


# -------- The weights of each agent, and which agents read each other's turns, from a run's newest episodes

EPISODES = 24
"""The maximum number of episodes from which the graph of readers is computed."""


def newest_episodes(run: ViewedRun) -> list[ShownEpisode]:
    """Return episodes of the most recent step that has recorded episodes."""
    steps = [int(step) for step in reversed(run.metrics.axes["step"][-3:])]
    for step in steps:
        found = step_episodes(run.path, "train", step)
        if found:
            return found[:EPISODES]
    return []


def team_rows(run: ViewedRun, episodes: Sequence[ShownEpisode]) -> list[dict[str, Any]]:
    """Return, for each agent, its settings and the weights that were used in its most recent turn."""
    agents = at(run.settings(), "team", "agents")
    own = (
        {str(row.get("name")): row for row in agents if isinstance(row, Mapping)}
        if isinstance(agents, list)
        else {}
    )
    last = {turn.agent: turn for episode in episodes for turn in episode.turns}
    names = list(dict.fromkeys([*run.agents(), *last]))
    return [
        {
            "name": name,
            "color": 1 + k % 7,
            "policy": last[name].policy if name in last else "–",
            "version": last[name].version if name in last else "–",
            "hash": last[name].weights if name in last else "–",
            "trained": last[name].trained if name in last else None,
            "system": str(own.get(name, {}).get("system") or ""),
            "prompt": str(own.get(name, {}).get("prompt") or ""),
        }
        for k, name in enumerate(names)
    ]


def readers(episodes: Sequence[ShownEpisode]) -> list[tuple[str, str, int]]:
    """Return triples of an author, a reader, and the number of the author's turns that the reader has read, largest number first."""
    counts = Counter[tuple[str, str]]()
    for episode in episodes:
        seen_by = witnesses(episode)
        counts.update((turn.agent, reader) for turn in episode.turns for reader in seen_by[turn.index])
    return [(author, reader, count) for (author, reader), count in counts.most_common()]
