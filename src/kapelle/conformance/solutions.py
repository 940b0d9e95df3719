"""Check that the right answer earns the full reward and nothing else does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kapelle.conformance.driving import NOTHING, accepts, always, attempt, in_words, scripted
from kapelle.conformance.finding import Finding
from kapelle.environment import Answerable, Environment, Scripted, asks_questions, offers
from kapelle.types import Split, Task


async def gold_pays(environment: Environment, chosen: Mapping[Split, Sequence[Task]]) -> list[Finding]:
    """Return whether the script's solution earns the full reward and nothing else does."""
    names = ("solver",)
    solvable = asks_questions(environment) and offers(environment, Scripted)
    if not solvable or not accepts(environment, names):
        why = "it has no script that solves a question alone"
        return [Finding("gold", "not checked", why), Finding("cheating", "not checked", why)]
    high = environment.reward_range[1]
    for task in (*chosen["train"], *chosen["test"]):
        played = await attempt(environment, task, names, scripted(environment, task))
        if (
            isinstance(played, str)
            or played.paid["solver"] != high
            or played.outcome.success not in (None, 1.0)
        ):
            return [
                Finding(
                    "gold",
                    "failed",
                    f"task {task.id}, solved by the script, pays {in_words(played)}, not {high}",
                )
            ]
    found = [Finding("gold", "ok", "the script's solution earns the full reward")]
    for task in chosen["train"]:
        # Nonsense, the question and solutions of other tasks, except those that happen to give the
        # answer.
        tasks = chosen["train"]
        assert offers(environment, Answerable), "others have no solutions to try"
        gold = environment.extract(scripted(environment, task)("solver", task.question, 0))
        solutions = [scripted(environment, other)("solver", other.question, 0) for other in tasks]
        for text in [
            text for text in (*NOTHING, task.question, *solutions) if environment.extract(text) != gold
        ]:
            played = await attempt(environment, task, names, always(text))
            if not isinstance(played, str) and (
                played.paid["solver"] >= high or played.outcome.success == 1.0
            ):
                return [
                    *found,
                    Finding("cheating", "failed", f"task {task.id} pays the full reward for {text[:60]!r}"),
                ]
    return [
        *found,
        Finding("cheating", "ok", "nonsense, the question itself and other tasks' solutions are not paid"),
    ]
