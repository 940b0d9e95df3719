"""Which of several texts speaks for the team: votes over their answers, and how far they agree."""

from __future__ import annotations

import random
from collections.abc import Mapping


def majority(
    said: Mapping[str, str],
    answers: Mapping[str, str | None],
    seed: int,
    weights: Mapping[str, float] | None = None,
) -> str:
    """Return the text whose answer has the most votes; `seed` draws among answers that tie.

    An agent has one vote, or its weight where `weights` has one. Texts without an answer have no vote,
    unless none has one.
    """
    votes = tally(answers, weights)
    if not votes:
        return next(iter(said.values()))
    most = max(votes.values())
    chosen = random.Random(f"{seed}/majority").choice(sorted(a for a, n in votes.items() if n == most))
    return next(text for name, text in said.items() if answers[name] == chosen)


def tally(
    answers: Mapping[str, str | None], weights: Mapping[str, float] | None = None
) -> Mapping[str, float]:
    """Return answer → votes; agents without an answer cast none."""
    votes: dict[str, float] = {}
    for name, answer in answers.items():
        if answer is not None:
            votes[answer] = votes.get(answer, 0.0) + (weights or {}).get(name, 1.0)
    return votes


def agreement(answers: Mapping[str, str | None]) -> float:
    """Return the share of all agents that give the commonest answer; who gives none agrees with nobody."""
    return max(tally(answers).values(), default=0.0) / len(answers)
