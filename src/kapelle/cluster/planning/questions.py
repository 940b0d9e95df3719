"""Compute the number of queries to judges in a step from the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kapelle.algorithm import Algorithm
from kapelle.environment import Environment, QuestionCounts, UsesModels, offers


def requested_by(environment: Environment) -> Mapping[str, QuestionCounts]:
    """Return the number of queries to each judge, by its path or name.

    The result is empty if there are no judges or if the number is unknown.
    """
    return environment.questions() if offers(environment, UsesModels) else {}


def episodes_of(algorithm: Algorithm) -> int:
    """Return the number of episodes per task in a step: the group size times the number of candidates of a tree."""
    tree = algorithm.data.tree
    return algorithm.data.group_size * (1 if tree is None else tree.candidates)


def rows(asked: Mapping[str, QuestionCounts], tasks: int, group: int) -> dict[str, dict[str, int]]:
    """Return the maximum number of queries to each judge for an episode, for a group, and for a step with `tasks` tasks."""
    return {
        name: {
            "of an episode": each.episode,
            "of a group": each.group,
            "of a step": each.of_step(tasks, group),
        }
        for name, each in asked.items()
    }


def describe(asked: Mapping[str, QuestionCounts], tasks: int, group: int) -> Iterator[str]:
    """Yield a line of text for each judge."""
    for name, each in asked.items():
        about = [
            f"{count} about each {what}"
            for what, count in (("episode", each.episode), ("group", each.group))
            if count
        ]
        yield (
            f"the judge {name} receives at most {each.of_step(tasks, group):,} requests in a step, {' and '.join(about)}; repeated "
            "requests are answered from its cache"
        )
