"""Reads from an episode's line only what the table of episodes and the league show; token ids and log-probs are counted.

They are most of a line, and counting commas is many times faster than parsing numbers. A line with anything but numbers in
those lists is parsed as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kapelle.viewer.lines import listing, mapping, number, parsed, text, whole

# -------- Who played whom, and who won, in episodes in which one wins what the others lose

FIXED = -1
"""The version of a player that does not learn."""
_NOTHING = 1e-6
"""Smaller differences of payments count as a draw."""


@dataclass(frozen=True, slots=True)
class SkimmedPlayer:
    """The player of one seat in an episode, and what the seat was paid."""

    name: str
    """Its policy; in a seat that a league has cast, the member's name; `opponent` and its name for an environment's own player."""
    version: int
    """Of its policy at its first turn, or `FIXED`."""
    paid: float


@dataclass(frozen=True, slots=True)
class SkimmedPair:
    """Two players in the order of their seats."""

    part: str
    """The environment's name in a mixture; empty otherwise."""
    one: str
    one_version: int
    other: str
    other_version: int


@dataclass(slots=True)
class Tally:
    """The results of a pair's episodes; `one` has won if it was paid more."""

    wins: int = 0
    draws: int = 0
    losses: int = 0
    unlike: int = 0
    """Episodes whose payments do not add up to 0, so that the players are not opposed in them."""


def players_of(
    row: Mapping[str, Any], turns: Sequence[Mapping[str, Any]], rewards: Mapping[str, float]
) -> tuple[SkimmedPlayer, ...]:
    """Return the players of an episode's row in the order of their seats; empty if it failed or was cut off."""
    if row.get("error") or row.get("truncated") is True:
        return ()
    # Games report who sat where: by seat, the agent or opponent, whether it is the latter, and its return.
    info = mapping(row.get("info"))
    returns = [number(each) for each in listing(info.get("returns"))]
    at: dict[int, tuple[str, bool]] = {}
    for agent, seats in mapping(info.get("seats")).items():
        own = [seat for each in listing(seats) if (seat := whole(each)) is not None]
        if own:  # an agent with several seats is paid alike for all of them
            at[min(own)] = (str(agent), False)
    for place, name in mapping(info.get("opponents")).items():
        if str(place).isdecimal() and len(str(place)) < 4:
            at[int(place)] = (text(name), True)
    there = [
        (seat, won)
        for seat in sorted(at)
        if 0 < seat <= len(returns) and (won := returns[seat - 1]) is not None
    ]
    paid = [(*at[seat], won) for seat, won in there] if len(there) == len(at) else []
    paid = paid or [(agent, False, reward) for agent, reward in rewards.items()]
    if len(paid) < 2:
        return ()
    first: dict[str, tuple[str, int]] = {}
    for turn in turns:
        agent, version = text(turn.get("agent")), whole(turn.get("version"))
        first.setdefault(agent, (text(turn.get("policy")) or agent, FIXED if version is None else version))
    learning = {text(turn.get("agent")) for turn in turns if turn.get("trained") is True}
    for agent, (policy, member) in cast_of(row).items():
        # A member is who it was when it entered; an exploiter or a partner goes on learning in the seat that it is given.
        version = first[agent][1] if agent in first and agent in learning else FIXED
        first[agent] = (member if policy else f"opponent {member}", version)
    return tuple(
        SkimmedPlayer(f"opponent {name}", FIXED, reward)
        if fixed
        else SkimmedPlayer(*first.get(name, (name, FIXED)), reward)
        for name, fixed, reward in paid
    )


DRAFT = re.compile(r"draft-(\w+)@\d+")
"""The name of a draft: a learner of a league on its way, as it was after some step."""


def cast_of(row: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return who plays in place of the team, by agent: a policy, empty for the environment's own player, and the member's name.

    All drafts of a learner are one: "self on its way".
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
    """Return the results of all pairs of players in these episodes, which come with the part that they belong to."""
    made: dict[SkimmedPair, Tally] = {}
    for part, players in found:
        total, size = (
            sum(each.paid for each in players),
            max((abs(each.paid) for each in players), default=0.0),
        )
        unlike = abs(total) > _NOTHING * max(1.0, size)
        for one, other in combinations(players, 2):
            tally = made.setdefault(
                SkimmedPair(part, one.name, one.version, other.name, other.version), Tally()
            )
            ahead = one.paid - other.paid
            tally.unlike += unlike
            tally.wins += ahead > _NOTHING
            tally.losses += ahead < -_NOTHING
            tally.draws += abs(ahead) <= _NOTHING
    return made


_PROMPT, _SAID, _LOGPROBS = b'"prompt_ids":[', b'],"completion_ids":[', b'],"logprobs":['


@dataclass(frozen=True, slots=True)
class Skimmed:
    """What the table of episodes shows of one."""

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
    speakers: Sequence[str]
    """The agent of each turn."""
    finishes: Sequence[str]
    """How turns ended, each reason once: `stop`, `length`, `error`."""
    tags: Sequence[str]
    """What the environment says is true of the episode (booleans in `info`), the task's part, and `cut off`."""
    part: str
    players: Sequence[SkimmedPlayer]
    """By seat."""
    met: str = ""
    """The member of a league that the task is played against; empty without one."""

    @property
    def reward(self) -> float | None:
        """The agents' mean return; None without one."""
        return sum(self.rewards.values()) / len(self.rewards) if self.rewards else None

    @property
    def words(self) -> str:
        """All text of the episode, for the search."""
        return " ".join([self.question, *self.said, self.final, self.error])


def skimmed(raw: bytes, line: int) -> Skimmed | None:
    """Return what the table shows of a line; None if the line is no episode."""
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
        [text(turn.get("agent")) for turn in turns],
        list(dict.fromkeys(text(turn.get("finish_reason")) for turn in turns)),
        _tags(row, task),
        text(task.get("part")),
        players_of(row, turns, rewards),
        # A further learner of a league sits at its own seat, and is met by nobody.
        " and ".join(
            sorted({each for policy, each in cast_of(row).values() if not policy.startswith("follower:")})
        ),
    )


MOST_TAGS = 20
"""Most tags of an episode."""


def _tags(row: Mapping[str, Any], task: Mapping[str, Any]) -> list[str]:
    """Return the words that an episode can be found by."""
    told = [str(name) for name, value in mapping(row.get("info")).items() if value is True]
    found = [text(task.get("part")), *(["cut off"] if row.get("truncated") is True else []), *told]
    return [tag[:60] for tag in found if tag][:MOST_TAGS]


def spreads(found: Sequence[Skimmed]) -> dict[int, float]:
    """Return the difference between the largest and the smallest reward of each group, of the agent for which it is largest."""
    members: dict[int, list[Skimmed]] = {}
    for each in found:
        members.setdefault(each.group, []).append(each)
    widest = {}
    for group, own in members.items():
        agents = dict.fromkeys(agent for each in own for agent in each.rewards)
        paid = [[each.rewards.get(agent, 0.0) for each in own] for agent in agents]
        widest[group] = max((max(rewards) - min(rewards) for rewards in paid), default=0.0)
    return widest


def _without_numbers(raw: bytes) -> bytes | None:
    """Return a line in which the turns' tokens are replaced by their number; None for a line of another form."""
    parts, at = [], 0
    while (start := raw.find(_PROMPT, at)) >= 0:
        said = raw.find(b"]", start)
        logprobs = raw.find(b"]", said + len(_SAID)) if raw.startswith(_SAID, said) else -1
        end = raw.find(b"]", logprobs + len(_LOGPROBS)) if raw.startswith(_LOGPROBS, logprobs) else -1
        # The only quotes are those of the three names; more of them mean text among the numbers. A list within a list
        # ends at the wrong bracket and leaves invalid JSON, which `skimmed` notices.
        if end < 0 or raw.count(b'"', start, end) != 6:
            return None
        first = said + len(_SAID)
        count = raw.count(b",", first, logprobs) + 1 if logprobs > first else 0
        parts += [raw[at:start], b'"completion_ids":%d' % count]
        at = end + 1
    return b"".join([*parts, raw[at:]])
