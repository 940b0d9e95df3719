"""Reads those fields of an episode's line that the table of episodes and the league show. The tokens of a turn are counted but not parsed.

Token ids and log-probs are most of a line, and counting commas is much faster than parsing numbers. If the lists of a
line contain anything except numbers, the whole line is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kapelle.viewer.lines import listing, mapping, number, parsed, text, whole

# -------- Results of episodes in which one player wins what the other players lose

FIXED = -1
"""The version number that stands for an untrained player."""
_NOTHING = 1e-6
"""The difference between returns below which a game counts as a draw."""


@dataclass(frozen=True, slots=True)
class SkimmedPlayer:
    """The player in one role of an episode, and the return of this player."""

    name: str
    """The name of the policy, or of the member if a league has assigned the role. For players of the environment, the name is
    `opponent` and the name of the player."""
    version: int
    """The version of the player's policy in its first turn, or `FIXED`."""
    total: float


@dataclass(frozen=True, slots=True)
class SkimmedPair:
    """Two players in the order of their roles."""

    part: str
    """The name of the environment in a mixture; empty if the environment is not a mixture."""
    one: str
    one_version: int
    other: str
    other_version: int


@dataclass(slots=True)
class Tally:
    """The results of the games of a pair of players. The player with the larger return wins, and `one` is the first player."""

    wins: int = 0
    draws: int = 0
    losses: int = 0
    unlike: int = 0
    """The number of episodes whose returns do not add up to 0, which means that the players are not opponents."""


def players_of(
    row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], rewards: Mapping[str, float]
) -> tuple[SkimmedPlayer, ...]:
    """Return the players in the row of an episode in the order of their roles.

    The result is empty if the episode failed or was truncated.
    """
    if row.get("error") or row.get("truncated") is True:
        return ()
    # Games report the role of each agent and opponent. This maps each role to the name, and whether it is an opponent.
    info = mapping(row.get("info"))
    returns = [number(each) for each in listing(info.get("returns"))]
    at: dict[int, tuple[str, bool]] = {}
    for agent, roles in mapping(info.get("seats")).items():
        own = [role for each in listing(roles) if (role := whole(each)) is not None]
        if own:  # an agent with several roles has the same return in all of them
            at[min(own)] = (str(agent), False)
    for place, name in mapping(info.get("opponents")).items():
        if str(place).isdecimal() and len(str(place)) < 4:
            at[int(place)] = (text(name), True)
    known = [
        (*at[role], value)
        for role in sorted(at)
        if 0 < role <= len(returns) and (value := returns[role - 1]) is not None
    ]
    if not known or len(known) < len(at):
        known = [(agent, False, reward) for agent, reward in rewards.items()]
    if len(known) < 2:
        return ()
    first: dict[str, tuple[str, int]] = {}
    for turn in turns:
        agent, version = text(turn.get("agent")), whole(turn.get("version"))
        first.setdefault(agent, (text(turn.get("policy")) or agent, FIXED if version is None else version))
    learning = {text(turn.get("agent")) for turn in turns if turn.get("trained") is True}
    for agent, (policy, member) in cast_of(row).items():
        # Members are not trained, but an exploiter or a partner is trained in its role.
        version = first[agent][1] if agent in first and agent in learning else FIXED
        first[agent] = (member if policy else f"opponent {member}", version)
    return tuple(
        SkimmedPlayer(f"opponent {name}", FIXED, reward)
        if fixed
        else SkimmedPlayer(*first.get(name, (name, FIXED)), reward)
        for name, fixed, reward in known
    )


DRAFT = re.compile(r"draft-(\w+)@\d+")
"""A regular expression for the name of a draft, which is a learner of a league at a step before it enters the pool."""


def cast_of(row: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the players that replace agents, by agent.

    Each player consists of the policy (empty for a player of the environment) and the name of the member. All drafts of
    a learner have the same name, such as "self on its way".
    """
    found = mapping(mapping(row.get("task")).get("cast"))
    pairs = {
        str(agent): (text(mapping(each).get("policy")), mapping(each).get("player"))
        for agent, each in found.items()
    }
    return {
        agent: (policy, DRAFT.sub(r"\1 on its way", member))
        for agent, (policy, member) in pairs.items()
        if isinstance(member, str) and member
    }


def tallies(found: Iterable[tuple[str, Sequence[SkimmedPlayer]]]) -> dict[SkimmedPair, Tally]:
    """Return the results of all pairs of players in the given episodes. Each episode is given as a pair of the part and the players."""
    made: dict[SkimmedPair, Tally] = {}
    for part, players in found:
        size = max((abs(each.total) for each in players), default=0.0)
        unlike = abs(sum(each.total for each in players)) > _NOTHING * max(1.0, size)
        for one, other in combinations(players, 2):
            tally = made.setdefault(
                SkimmedPair(part, one.name, one.version, other.name, other.version), Tally()
            )
            ahead = one.total - other.total
            tally.unlike += unlike
            tally.wins += ahead > _NOTHING
            tally.losses += ahead < -_NOTHING
            tally.draws += abs(ahead) <= _NOTHING
    return made


_PROMPT, _SAID, _LOGPROBS = b'"prompt_ids":[', b'],"completion_ids":[', b'],"logprobs":['


@dataclass(frozen=True, slots=True)
class Skimmed:
    """The fields of an episode that are shown in the table of episodes."""

    line: int
    group: int
    task: str
    question: str
    final: str
    success: float | None
    rewards: Mapping[str, float]
    """The return of each agent, as in `Episode`."""
    error: str
    tokens: int
    texts: Sequence[str]
    """The text of each turn."""
    speakers: Sequence[str]
    """The agent of each turn."""
    finishes: Sequence[str]
    """The distinct finish reasons of the turns, such as `stop`, `length` and `error`."""
    tags: Sequence[str]
    """The tags of the episode: the names in `info` whose value is true, the part of the task, and `cut off` for a truncated episode."""
    part: str
    players: Sequence[SkimmedPlayer]
    """The players of the episode, in the order of their roles."""

    @property
    def reward(self) -> float | None:
        """The mean return of the agents, or None if there are no returns."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None


def skimmed(raw: bytes, line: int) -> Skimmed | None:
    """Return the fields of a line that are shown in the table, or None if the line is not an episode."""
    short = _without_numbers(raw)
    row = None if short is None else parsed(short)
    if row is None and short != raw:
        row = parsed(raw)
    if row is None:
        return None
    task = mapping(row.get("task"))
    turns = [each for each in listing(row.get("turns")) if isinstance(each, dict)]
    rewards = {str(agent): number(value) or 0.0 for agent, value in mapping(row.get("rewards")).items()}
    tokens = 0
    for turn in turns:
        ids = turn.get("completion_ids")
        tokens += (whole(ids) or 0) if isinstance(ids, int) else len(listing(ids))
        if reward := number(turn.get("reward")):
            agent = text(turn.get("agent")) or "?"
            rewards[agent] = rewards.get(agent, 0.0) + reward
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
        [text(turn.get("agent")) for turn in turns],
        list(dict.fromkeys(text(turn.get("finish_reason")) for turn in turns)),
        _tags(row, task),
        text(task.get("part")),
        players_of(row, turns, rewards),
    )


MOST_TAGS = 20
"""The maximum number of tags of an episode."""


def _tags(row: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    """Return the tags of an episode."""
    facts = [str(name) for name, value in mapping(row.get("info")).items() if value is True]
    found = [text(task.get("part")), *(["cut off"] if row.get("truncated") is True else []), *facts]
    return [tag[:60] for tag in found if tag][:MOST_TAGS]


def spreads(found: Sequence[Skimmed]) -> dict[int, float]:
    """Return, for each group, the largest difference between two rewards of the same agent."""
    members: dict[int, list[Skimmed]] = {}
    for each in found:
        members.setdefault(each.group, []).append(each)
    widest = {}
    for group, own in members.items():
        agents = dict.fromkeys(agent for each in own for agent in each.rewards)
        columns = [[each.rewards.get(agent, 0.0) for each in own] for agent in agents]
        widest[group] = max((max(rewards) - min(rewards) for rewards in columns), default=0.0)
    return widest


def _without_numbers(raw: bytes) -> bytes | None:
    """Return a line in which the tokens of each turn are replaced by their number, or None if the line has another format."""
    parts, at = [], 0
    while (start := raw.find(_PROMPT, at)) >= 0:
        completion = raw.find(b"]", start)
        logprobs = raw.find(b"]", completion + len(_SAID)) if raw.startswith(_SAID, completion) else -1
        end = raw.find(b"]", logprobs + len(_LOGPROBS)) if raw.startswith(_LOGPROBS, logprobs) else -1
        # The three names have six quotes; more quotes mean that there is text among the numbers. A nested list is cut
        # at the wrong bracket, which leaves invalid JSON that `skimmed` detects.
        if end < 0 or raw.count(b'"', start, end) != 6:
            return None
        first = completion + len(_SAID)
        count = raw.count(b",", first, logprobs) + 1 if logprobs > first else 0
        parts += [raw[at:start], b'"completion_ids":%d' % count]
        at = end + 1
    return b"".join([*parts, raw[at:]])
