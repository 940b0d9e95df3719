"""Ratings from games between pairs: Bradley and Terry's model (1952), with intervals by resampling.

A draw is half a win. Only players that are linked by games, directly or through others, can be compared; ratings are on
Elo's scale (400 points are odds of ten to one) with a mean of 0 within each such set.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

Results = Mapping[tuple[int, int], tuple[int, int, int]]
"""Wins of the first, draws and wins of the second player, by two players' numbers, the smaller one first."""
PRIOR = 0.5
"""Wins and losses against an average player that everybody is given: who only won gets a finite rating."""
RESAMPLES = 100
_ROUNDS, _CLOSE = 300, 1e-4


def linked(count: int, results: Results) -> list[list[int]]:
    """Return the sets of players that games link, the largest first; players without games are left out."""
    near: dict[int, set[int]] = {}
    for one, other in results:
        near.setdefault(one, set()).add(other)
        near.setdefault(other, set()).add(one)
    left, found = [k for k in range(count) if k in near], []
    while left:
        members, waiting = set(), [left[0]]
        while waiting:
            each = waiting.pop()
            if each not in members:
                members.add(each)
                waiting.extend(near[each])
        found.append(sorted(members))
        left = [k for k in left if k not in members]
    return sorted(found, key=len, reverse=True)


def ratings(members: Sequence[int], results: Results, seed: int = 0) -> dict[int, tuple[float, float, float]]:
    """Return rating, lower and upper end of its 95 % interval for linked players."""
    own = {pair: result for pair, result in results.items() if pair[0] in members}
    middle = _fit(members, own, dict.fromkeys(members, 1.0))
    draw = random.Random(seed)
    drawn = [
        _elo(_fit(members, {pair: _resampled(result, draw) for pair, result in own.items()}, middle))
        for _ in range(RESAMPLES)
    ]
    rated = _elo(middle)
    cut = round(0.025 * RESAMPLES)
    ends = {each: sorted(other[each] for other in drawn) for each in members}
    return {
        each: (rated[each], min(rated[each], ends[each][cut]), max(rated[each], ends[each][-1 - cut]))
        for each in members
    }


def _fit(members: Sequence[int], results: Results, start: Mapping[int, float]) -> dict[int, float]:
    """Return strengths by Zermelo's iteration (Hunter 2004, equation 3)."""
    won = dict.fromkeys(members, PRIOR)
    for (one, other), (wins, draws, losses) in results.items():
        won[one] += wins + draws / 2
        won[other] += losses + draws / 2
    strengths = dict(start)
    for _ in range(_ROUNDS):
        met = {each: 2 * PRIOR / (strengths[each] + 1.0) for each in members}
        for (one, other), result in results.items():
            share = sum(result) / (strengths[one] + strengths[other])
            met[one] += share
            met[other] += share
        moved = {each: won[each] / met[each] for each in members}
        change = max(abs(math.log(moved[each] / strengths[each])) for each in members)
        strengths = moved
        if change < _CLOSE:
            break
    return strengths


def _elo(strengths: Mapping[int, float]) -> dict[int, float]:
    logs = {each: 400 * math.log10(strength) for each, strength in strengths.items()}
    mean = sum(logs.values()) / len(logs)
    return {each: value - mean for each, value in logs.items()}


def _resampled(result: tuple[int, int, int], draw: random.Random) -> tuple[int, int, int]:
    """Return as many games, drawn from these."""
    wins, draws, losses = result
    count = wins + draws + losses
    drawn = _binomial(count, draws / count, draw) if count else 0
    decided = wins + losses
    won = _binomial(count - drawn, wins / decided, draw) if decided else 0
    return won, drawn, (count - drawn - won if decided else 0)


def _binomial(count: int, share: float, draw: random.Random) -> int:
    if count <= 50:
        return sum(draw.random() < share for _ in range(count))
    near = draw.gauss(count * share, math.sqrt(count * share * (1 - share)))
    return min(count, max(0, round(near)))
