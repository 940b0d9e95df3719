"""Of an episode's line, only what the table of episodes says: ids and log-probs are counted, not read.

They are most of a line. Between the brackets of those lists the writer puts numbers alone; a line that holds anything else
is read as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kapelle.viewer.episode import listing, mapping, text, whole
from kapelle.viewer.lines import number, parsed
from kapelle.viewer.meetings import Player, players_of

_PROMPT, _SAID, _LOGPROBS = b'"prompt_ids":[', b'],"completion_ids":[', b'],"logprobs":['


@dataclass(frozen=True, slots=True)
class Skimmed:
    """What the table of episodes says of one."""

    line: int
    group: int
    task: str
    question: str
    final: str
    success: float | None
    rewards: Mapping[str, float]
    """Return of each agent, as in `Episode`."""
    error: str
    tokens: int
    said: Sequence[str]
    """The text of each turn."""
    part: str
    players: Sequence[Player]
    """By seat; see `meetings`."""

    @property
    def reward(self) -> float | None:
        """The agents' mean return; None where none was paid."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None

    @property
    def words(self) -> str:
        """Everything that was asked, said and answered in it, to be searched."""
        return " ".join([self.question, *self.said, self.final, self.error])


def skimmed(raw: bytes, line: int) -> Skimmed | None:
    """Return what the table says of a line; None for one that holds no episode."""
    short = _without_numbers(raw)
    row = None if short is None else parsed(short)
    if row is None and short != raw:
        row = parsed(raw)
    if row is None:
        return None
    task, turns = (
        mapping(row.get("task")),
        [each for each in listing(row.get("turns")) if isinstance(each, dict)],
    )
    rewards = {str(agent): number(paid) or 0.0 for agent, paid in mapping(row.get("rewards")).items()}
    tokens = 0
    for turn in turns:
        ids = turn.get("completion_ids")
        tokens += ids if isinstance(ids, int) else len(listing(ids))
        if paid := number(turn.get("reward")):
            agent = text(turn.get("agent")) or "?"
            rewards[agent] = rewards.get(agent, 0.0) + paid
    return Skimmed(
        line,
        whole(row.get("group")) or 0,
        text(task.get("id")),
        text(task.get("question")),
        text(mapping(row.get("info")).get("final")),
        number(row.get("success")),
        rewards,
        text(row.get("error")),
        tokens,
        [text(turn.get("text")) for turn in turns],
        text(task.get("part")),
        players_of(row, turns, rewards),
    )


def spreads(found: Sequence[Skimmed]) -> dict[int, float]:
    """Return the most less the least reward of each group."""
    paid: dict[int, list[float]] = {}
    for each in found:
        paid.setdefault(each.group, []).append(each.reward or 0.0)
    return {group: max(rewards) - min(rewards) for group, rewards in paid.items()}


def _without_numbers(raw: bytes) -> bytes | None:
    """Return a line whose turns have the number of their tokens instead of the tokens; None for one of another form."""
    parts, at = [], 0
    while (start := raw.find(_PROMPT, at)) >= 0:
        said = raw.find(b"]", start)
        logprobs = raw.find(b"]", said + len(_SAID)) if raw.startswith(_SAID, said) else -1
        end = raw.find(b"]", logprobs + len(_LOGPROBS)) if raw.startswith(_LOGPROBS, logprobs) else -1
        # Of quotes there may be those of the three names alone. Lists in lists leave what is no JSON.
        if end < 0 or raw.count(b'"', start, end) != 6:
            return None
        first = said + len(_SAID)
        count = raw.count(b",", first, logprobs) + 1 if logprobs > first else 0
        parts += [raw[at:start], b'"completion_ids":%d' % count]
        at = end + 1
    return b"".join([*parts, raw[at:]])
