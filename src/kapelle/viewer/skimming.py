"""Of an episode's line, only what the table of episodes and the league say: ids and log-probs are counted, not read.

They are most of a line. Between the brackets of those lists the writer puts numbers alone; a line that holds anything else
is read as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kapelle.viewer.episode import listing, mapping, text, whole
from kapelle.viewer.lines import number, parsed

# -------- Who played whom in episodes in which what one wins the others lose, and who won

FIXED = -1
"""The version of a player that does not learn."""
_NOTHING = 1e-6


@dataclass(frozen=True, slots=True)
class Player:
    """Who sat at a seat of one episode, and what the seat was paid."""

    name: str
    """Its policy; of an environment's own player `opponent` and its name."""
    version: int
    """Of its policy at its first turn, or `FIXED`."""
    paid: float


@dataclass(frozen=True, slots=True)
class Pair:
    """Two players in the order of their seats."""

    part: str
    """The environment of a mixture; empty outside of one."""
    one: str
    one_version: int
    other: str
    other_version: int


@dataclass(slots=True)
class Tally:
    """What came of the episodes of a pair; `wins` are those of `one`, which was paid more."""

    wins: int = 0
    draws: int = 0
    losses: int = 0
    unlike: int = 0
    """Episodes whose payments do not add up to nothing: in them nobody wins what others lose."""


def players_of(
    row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], rewards: Mapping[str, float]
) -> tuple[Player, ...]:
    """Return the players of an episode's row in the order of their seats; none where it failed or was cut off."""
    if row.get("error") or row.get("truncated") is True:
        return ()
    seated = _seated(mapping(row.get("info")))
    paid = seated or [(agent, False, reward) for agent, reward in rewards.items()]
    if len(paid) < 2:
        return ()
    first: dict[str, tuple[str, int]] = {}
    for turn in turns:
        agent, version = text(turn.get("agent")), whole(turn.get("version"))
        first.setdefault(agent, (text(turn.get("policy")) or agent, FIXED if version is None else version))
    return tuple(
        Player(f"opponent {name}", FIXED, reward)
        if fixed
        else Player(*first.get(name, (name, FIXED)), reward)
        for name, fixed, reward in paid
    )


def _seated(info: Mapping[str, Any]) -> list[tuple[str, bool, float]]:
    """Return, by seat, agent or opponent, whether it is the latter, and its return, as games report them."""
    returns = [number(each) for each in listing(info.get("returns"))]
    at: dict[int, tuple[str, bool]] = {}
    for agent, seats in mapping(info.get("seats")).items():
        own = [seat for each in listing(seats) if (seat := whole(each)) is not None]
        if own:  # who has several seats is paid alike for all
            at[min(own)] = (str(agent), False)
    for place, name in mapping(info.get("opponents")).items():
        if str(place).isdecimal() and len(str(place)) < 4:
            at[int(place)] = (text(name), True)
    there = [
        (seat, paid)
        for seat in sorted(at)
        if 0 < seat <= len(returns) and (paid := returns[seat - 1]) is not None
    ]
    return [(*at[seat], paid) for seat, paid in there] if len(there) == len(at) else []


def tallies(found: Iterable[tuple[str, Sequence[Player]]]) -> dict[Pair, Tally]:
    """Return what came of all pairs of players of these episodes, each with the part that it belongs to."""
    made: dict[Pair, Tally] = {}
    for part, players in found:
        total, size = (
            sum(each.paid for each in players),
            max((abs(each.paid) for each in players), default=0.0),
        )
        unlike = abs(total) > _NOTHING * max(1.0, size)
        for one, other in combinations(players, 2):
            tally = made.setdefault(Pair(part, one.name, one.version, other.name, other.version), Tally())
            ahead = one.paid - other.paid
            tally.unlike += unlike
            tally.wins += ahead > _NOTHING
            tally.losses += ahead < -_NOTHING
            tally.draws += abs(ahead) <= _NOTHING
    return made


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
