"""What models that pay episodes are asked in a step, counted from settings alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kapelle.algorithm import Algorithm
from kapelle.environment import CountsCosts, Environment, QuestionCounts, offers


def asked_by(environment: Environment) -> Mapping[str, QuestionCounts]:
    """Return how often each model that pays episodes is asked, by its path or name; empty where none is, or it is not known."""
    return environment.questions() if offers(environment, CountsCosts) else {}


def episodes_of(algorithm: Algorithm) -> int:
    """Return how many episodes of a task a step plays: its group, with each candidate of a tree."""
    tree = algorithm.data.tree
    return algorithm.data.group_size * (1 if tree is None else tree.candidates)


def rows(asked: Mapping[str, QuestionCounts], tasks: int, group: int) -> dict[str, dict[str, int]]:
    """Return the most questions to each model about an episode, a group, and a step of so many tasks with a `group` of episodes each."""
    return {
        name: {
            "of an episode": each.episode,
            "of a group": each.group,
            "of a step": each.of_step(tasks, group),
        }
        for name, each in asked.items()
    }


def describe(asked: Mapping[str, QuestionCounts], tasks: int, group: int) -> Iterator[str]:
    """Yield a line on each model that is asked."""
    for name, each in asked.items():
        about = [
            f"{count} about each {what}"
            for what, count in (("episode", each.episode), ("group", each.group))
            if count
        ]
        yield (
            f"the judge {name} is asked at most {each.of_step(tasks, group):,} questions in a step, {' and '.join(about)}; what it has "
            "answered already is not asked again"
        )
