"""Creates the pages with the results of `kapelle blame`, which show the turns that made episodes fail.

A conversation is drawn as a strip that shows the probability of success over time. Each change has the colour of the
agent whose turn caused it.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from kapelle.runs.blamed import Blame, BlamedEpisode, blame_files, read_blamed, tokens_hash
from kapelle.runs.checkpoint_folder import list_checkpoints
from kapelle.runtime.files import step_of
from kapelle.viewer.calls import shown_calls
from kapelle.viewer.episode import ShownEpisode

WIDTH, HEIGHT = 96.0, 132.0
"""The width of one moment of the strip, and the height of probability 1, in CSS pixels."""
EDGE = 34.0
"""The width of the margin that contains the numbers, in CSS pixels."""
LISTED = 500
"""The maximum number of episodes in the list."""
SMALL = (64.0, 18.0)
"""The width and height of a curve in the list, in CSS pixels."""


def kept(run: Path) -> dict[str, Blame]:
    """Return the results by file name, with the newest file first. Empty files are omitted."""
    found = {}
    for path in blame_files(run):
        head, episodes = read_blamed(path)
        if episodes:
            ordered = sorted(episodes, key=lambda each: (each.solved, -(_cost(each) or 0.0)))
            found[path.name] = Blame(head, tuple(ordered), file=path)
    return found


def offered(run: Path, split: str, step: int, episode: ShownEpisode) -> dict[str, Any] | None:
    """Return the file that shows which turn made an episode fail, or the command that measures it.

    The result is None for an episode that did not fail or has only one turn, and for a run without the checkpoint that
    the command loads.
    """
    if episode.success is None or episode.success >= 1.0 or episode.error or len(episode.turns) < 2:
        return None
    said = tokens_hash((turn.agent, turn.ids) for turn in episode.turns)
    for name, result in kept(run).items():
        for number, each in enumerate(result.episodes):
            if (each.task, each.seed, each.tokens_hash) == (episode.task, episode.seed, said):
                return {"file": name, "number": number}
    steps = [step_of(folder) for folder in list_checkpoints(run / "checkpoints")]
    if not steps:
        return None
    words = ["kapelle", "blame", str(run)]
    if split == "train":
        words += ["--split", "train"]
    elif step in steps[:-1]:
        words[-1] += f"@{step}"
    return {"command": shlex.join(words)}


def _cost(episode: BlamedEpisode) -> float | None:
    return None if episode.culprit is None else episode.culprit.drop


def listing(result: Blame) -> dict[str, Any]:
    """Return the content of the page for one file: a table of agents and turns, and the episodes."""
    return {
        "file": "" if result.file is None else result.file.name,
        "measured": result.measured,
        "rows": [{**row, "color": color_of(list(result.lost_by), row["agent"])} for row in result.rows()],
        "failed": len(result.failed),
        "solved": len(result.solved),
        "nobody": sum(each.culprit is None for each in result.failed),
        "episodes": [
            {
                "number": number,
                "episode": each,
                "culprit": each.culprit,
                "color": 0 if each.culprit is None else color_of(each.agents, each.culprit.agent),
                "curve": _small(each.values),
            }
            for number, each in enumerate(result.episodes[:LISTED])
        ],
        "more": max(0, len(result.episodes) - LISTED),
    }


def color_of(agents: Sequence[str], agent: str) -> int:
    """Return the number of an agent's colour, which is the same as on the pages of episodes."""
    return 1 + list(agents).index(agent) % 7 if agent in agents else 0


def _small(values: Sequence[float | None]) -> str:
    """Return the points of a curve in the list for an SVG polyline. Unknown values are omitted."""
    width, height = SMALL
    step = width / max(1, len(values) - 1)
    known = [(k * step, value) for k, value in enumerate(values) if value is not None]
    return " ".join(f"{1 + x:.1f},{1 + (1 - value) * height:.1f}" for x, value in known)


def conversation(episode: BlamedEpisode, chosen: int | None, form: object = None) -> dict[str, Any]:
    """Return the content of a conversation's page, which consists of the strip and of each turn with its alternatives.

    The argument `chosen` is the index of the turn whose alternatives are shown; the default is the turn with the
    largest drop, or the first turn. The argument `form` is the format of tool calls in the settings of the run.
    """
    indexes = [turn.index for turn in episode.turns]
    if chosen not in indexes:
        culprit = episode.culprit
        chosen = culprit.index if culprit is not None else next(iter(indexes), None)
    turns = [
        {
            "turn": turn,
            "color": color_of(episode.agents, turn.agent),
            "chosen": turn.index == chosen,
            "calls": shown_calls(turn.text, form),
        }
        for turn in episode.turns
    ]
    return {"episode": episode, "turns": turns, "strip": _strip(episode, turns), "chosen": chosen}


def _strip(episode: BlamedEpisode, turns: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def x(moment: int) -> float:
        return round(EDGE + moment * WIDTH, 1)

    def y(value: float) -> float:
        return round(EDGE / 2 + (1.0 - value) * HEIGHT, 1)

    moments = len(episode.values) - 1
    moves = []
    taken: dict[int, int] = {}
    agents_at = Counter(each["turn"].moment for each in turns)
    tall = EDGE + HEIGHT + 16.0 * max(agents_at.values(), default=1)
    for each in turns:
        turn = each["turn"]
        below = taken[turn.moment] = taken.get(turn.moment, -1) + 1
        known = turn.before is not None and turn.after is not None
        moves.append(
            {
                **each,
                # The names of agents that act at the same moment are below each other.
                "name": (round(x(turn.moment) + WIDTH / 2, 1), round(EDGE + HEIGHT + 16.0 * below, 1)),
                # The area in which the pointer selects a turn; agents that act at the same moment are side by side.
                "reach": (
                    round(x(turn.moment) + below * WIDTH / agents_at[turn.moment], 1),
                    round(WIDTH / agents_at[turn.moment], 1),
                ),
                "line": (x(turn.moment), y(turn.before), x(turn.moment + 1), y(turn.after))
                if known
                else None,
            }
        )
    points = [(x(k), y(value), value) for k, value in enumerate(episode.values) if value is not None]
    together = [
        (x(k), y(before), x(k + 1), y(after))
        for k, (before, after) in enumerate(pairwise(episode.values))
        if before is not None and after is not None and agents_at[k] > 1
    ]
    return {
        "width": 2 * EDGE + moments * WIDTH,
        "height": tall,
        "grid": [(y(value), f"{value:g}") for value in (0.0, 0.5, 1.0)],
        "left": EDGE,
        "right": x(moments),
        "moves": moves,
        "points": points,
        "together": together,
    }
