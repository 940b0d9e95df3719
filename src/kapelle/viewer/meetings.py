"""Who played whom in episodes in which what one wins the others lose, and who won."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kapelle.viewer.episode import listing, mapping, text, whole
from kapelle.viewer.lines import number

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
