"""What the pages show of a run: its row in the list, warnings, team and who reads whom, settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kapelle.runs.blamed import blame_files
from kapelle.runs.findings import read_evaluated, read_notes
from kapelle.runs.reader import read_left_out
from kapelle.runs.recorded import all_losses
from kapelle.runs.summary import flat, opposed, plays_against, troubles
from kapelle.runs.verdict import Verdict, judge
from kapelle.viewer import curves
from kapelle.viewer.episode import ShownEpisode, step_episodes, witnesses
from kapelle.viewer.library import ViewedRun
from kapelle.viewer.lines import damaged_files, mean, number, readable


def at(settings: Mapping[str, Any], *way: str) -> Any:
    """Return the value at a path through nested settings; None if the path ends before."""
    found: Any = settings
    for name in way:
        if not isinstance(found, Mapping):
            return None
        found = found.get(name)
    return found


def listed(run: ViewedRun) -> dict[str, Any]:
    """Return what the list of runs shows of one."""
    with run.lock:
        run.refresh()
        settings, status, last = run.settings(), run.status(), run.metrics.last()
        measured, columns = run.measured(), run.metrics.columns
        # The small curve in the list shows success, or what the first agent is paid.
        returns = [column for name, column in columns.items() if name.startswith(("return/", "reward/"))]
        curve = columns.get("success") or (returns[0] if returns else [])
        paid = _paid(last, run.agents())
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
            "success": last.get("success"),
            "scored": last.get("scored"),
            "paid": paid if len(set(paid.values())) > 1 else {},
            "reward": mean([value for name, value in last.items() if name.startswith("reward/")]),
            "measured": None if measured is None else {"success": measured["success"], "step": measured["step"], "interval": _ends(measured), "parts": _parts(measured)},
            "spark": [value for value in curve if value is not None],
            "damaged": run.damaged,
            "league": plays_against(settings, last, columns),
            "verdict": (found := verdict(run)),
            "remedy": remedy(found, str(status["state"])),
            "panels": {curves.panel_of(name) for name in columns},
            "notes": read_notes(run.path),
            "left_out": read_left_out(run.path),
            "stages": is_stage(run),
            "blame": bool(blame_files(run.path)),
        }  # fmt: skip


def _paid(last: Mapping[str, float], agents: Sequence[str]) -> dict[str, float]:
    """Return the last step's mean reward of each agent that has one, in the order of the settings."""
    return {agent: last[f"reward/{agent}"] for agent in agents if f"reward/{agent}" in last}


def remedy(found: Verdict, state: str) -> str:
    """Return what to do about a verdict; a run that has ended is told how to go on instead of to wait."""
    if found.word != "young" or state == "running":
        return found.advice.remedy
    if state == "finished":
        return (
            "The run has ended. Train it for longer with `kapelle train --resume RUN training.steps=N`, or take more tasks a "
            "step (`training.tasks_per_step`) in the next one."
        )
    return "The run does not go on by itself: `kapelle train --resume RUN` continues it where it ended."


def verdict(run: ViewedRun) -> Verdict:
    """Return whether a run is healthy, flat, diverging, …; worked out once for what was read."""
    with run.lock:
        if run.verdict is None or run.verdict[0] != run.edition:
            table, settings = run.metrics, run.settings()
            against = opposed(settings, table.last(), table.columns)
            found = judge(table.axes["step"], table.columns, run.evaluations, opposed=against)
            run.verdict = run.edition, found
        return run.verdict[1]


def _parts(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return an evaluation's further rates (sets, pass@k), each as a row; those that were not measured are left out."""
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
    """Return the settings in which runs differ, each with every run's value."""
    values = [flat(run.settings()) for run in runs]
    names = dict.fromkeys(name for own in values for name in own)
    rows = [{"name": name, "values": [own.get(name, "–") for own in values]} for name in names]
    return [row for row in rows if len({str(value) for value in row["values"]}) > 1]


def alike(run: ViewedRun) -> str:
    """Return a key that runs share if they differ only in their seed."""
    settings = flat(run.settings())
    return repr(
        sorted((key, str(value)) for key, value in settings.items() if key not in ("seed", "description"))
    )


def warnings(run: ViewedRun) -> list[str]:
    """Return what went wrong in a run's steps, and what its files hold that no page can show, in words."""
    with run.lock:
        run.refresh()
        lines = troubles(run.metrics.axes["step"], run.metrics.columns)

        def counted(count: int, word: str) -> str:
            return f"{count:,} {word}{'' if count == 1 else 's'}"

        wrong, table, faults = run.status()["wrong"], run.metrics, damaged_files(run.path)
        file = run.path / "metrics.jsonl"
        unread = (file.is_symlink() or file.exists()) and not readable(file)
        found = [
            (wrong, wrong),
            (not run.settings(), "config.yaml cannot be read: what this run was told to do is not known"),
            (unread, "metrics.jsonl cannot be read: no curve is drawn"),
            (table.disordered, f"{counted(table.disordered, 'row')} out of order or twice in metrics.jsonl; of several rows of a step the last one is drawn"),
            (table.endless, f"{counted(table.endless, 'number')} in metrics.jsonl not finite; curves have gaps there"),
            (run.damaged, f"{counted(run.damaged, 'line')} of its tables damaged and left out"),
            (faults, f"{counted(len(faults), 'file')} of episodes damaged; some episodes are missing here: {', '.join(faults[:3])}"),
        ]  # fmt: skip
        return [*lines, *(str(line) for holds, line in found if holds), *all_losses(run.path)]


def settings_rows(run: ViewedRun) -> list[dict[str, Any]]:
    """Return every resolved setting with its origin; those that differ from the defaults are marked."""
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
    """Return the newest `kapelle eval` of a run: the team, each agent alone, and votes, with the same number of tokens."""
    for row in reversed(read_evaluated(run.path)):
        team, others = row.get("team"), row.get("baselines")
        if not isinstance(team, Mapping) or number(team.get("success")) is None:
            continue
        found = [_measured("the team", team)]
        for other in others if isinstance(others, list) else []:
            if isinstance(other, Mapping) and number(other.get("success")) is not None:
                agents = other.get("agents")
                who = ", ".join(map(str, agents)) if isinstance(agents, list) else "?"
                answers = other.get("answers")
                found.append(
                    _measured(
                        f"{who} alone" if answers == 1 else f"{who}, majority of {answers} answers", other
                    )
                )
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


def is_stage(run: ViewedRun) -> bool:
    """Return whether a run is one of several stages of a recipe."""
    return (run.path.parent / "stages.yaml").is_file()


def _first_and_last(run: ViewedRun) -> list[tuple[float, float]]:
    """Return step and success of the first and the last evaluation that has one."""
    with run.lock:
        found = [
            (step, success)
            for row in run.evaluations
            if (step := number(row.get("step"))) is not None
            and (success := number(row.get("success"))) is not None
        ]
    return [found[0], found[-1]] if found else []


def stages(run: ViewedRun, others: Sequence[ViewedRun]) -> list[dict[str, Any]]:
    """Return the stages of the recipe that a run belongs to, in order; empty for a single run."""
    whole = run.path.parent
    if not is_stage(run):
        return []
    return [
        {
            "key": each.key,
            "name": each.path.name,
            "state": each.status()["state"],
            "here": each is run,
            "run": listed(each),
            "measured": _first_and_last(each),
        }
        for each in sorted(others, key=lambda other: other.path.name)
        if each.path.parent == whole
    ]


# -------- Who plays with which weights, and who reads whom: from a run's newest episodes

EPISODES = 24
"""Most episodes that the graph is made from."""


def newest_episodes(run: ViewedRun) -> list[ShownEpisode]:
    """Return episodes of the newest step that has some."""
    steps = [int(step) for step in reversed(run.metrics.axes["step"][-3:])]
    for step in steps:
        found = step_episodes(run.path, "train", step)
        if found:
            return found[:EPISODES]
    return []


def team_rows(run: ViewedRun, episodes: Sequence[ShownEpisode]) -> list[dict[str, Any]]:
    """Return, for each agent, its seat in the settings and the weights that its newest turn was sampled with."""
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


def graph(names: Sequence[str], episodes: Sequence[ShownEpisode]) -> dict[str, Any]:
    """Return nodes on a circle and arrows to those who read them; an arrow's width shows how often."""
    often: dict[tuple[str, str], int] = {}
    for episode in episodes:
        for turn in episode.turns:
            for reader in witnesses(episode)[turn.index]:
                often[turn.agent, reader] = often.get((turn.agent, reader), 0) + 1
    count = max(1, len(names))
    radius = 30 + 26 * count if count > 1 else 0
    width, height = 2 * radius * (1.35 if count > 1 else 0) + 220, (2 * radius if count > 2 else 0) + 90
    places = {}
    for k, name in enumerate(names):
        angle = math.pi + 2 * math.pi * k / count
        places[name] = (
            width / 2 + 1.35 * radius * math.cos(angle),
            height / 2 + (radius * math.sin(angle) if count > 2 else 0),
        )
    arrows = []
    for (said, reader), times in often.items():
        if said in places and reader in places:
            (x1, y1), (x2, y2) = places[said], places[reader]
            length = math.hypot(x2 - x1, y2 - y1) or 1.0
            dx, dy = (x2 - x1) / length, (y2 - y1) / length
            side = 12
            start = (x1 + dx * 62 - dy * side, y1 + dy * 26 + dx * side)
            end = (x2 - dx * 68 - dy * side, y2 - dy * 30 + dx * side)
            label = ((start[0] + end[0]) / 2 - dy * 12, (start[1] + end[1]) / 2 + dx * 12)
            arrows.append(
                {"from": start, "to": end, "label": label, "times": times, "said": said, "reader": reader}
            )
    nodes = [
        {"name": name, "x": x, "y": y, "color": 1 + k % 7} for k, (name, (x, y)) in enumerate(places.items())
    ]
    return {"nodes": nodes, "arrows": arrows, "width": width, "height": height, "episodes": len(episodes)}
