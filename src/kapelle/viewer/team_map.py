"""Who plays with which weights, and who reads whom: from a run's newest episodes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from kapelle.viewer.episode import Episode, step_episodes, witnesses
from kapelle.viewer.library import Run
from kapelle.viewer.presenting import agents_of, at

EPISODES = 24
"""Episodes that the graph is gathered from."""


def newest_episodes(run: Run) -> list[Episode]:
    """Return some episodes of the newest step that has any."""
    steps = [int(step) for step in reversed(run.metrics.axes["step"][-3:])]
    for step in steps:
        found = step_episodes(run.path, "train", step)
        if found:
            return found[:EPISODES]
    return []


def team_rows(run: Run, episodes: Sequence[Episode]) -> list[dict[str, Any]]:
    """Return, for each agent, its seat in the settings and the weights that its newest turn was sampled with."""
    agents = at(run.settings(), "team", "agents")
    own = (
        {str(row.get("name")): row for row in agents if isinstance(row, Mapping)}
        if isinstance(agents, list)
        else {}
    )
    last = {turn.agent: turn for episode in episodes for turn in episode.turns}
    names = list(dict.fromkeys([*agents_of(run), *last]))
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


def graph(names: Sequence[str], episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return nodes and arrows of who reads whom, with their places on a circle; the width tells how often."""
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
