"""Tasks of inspect_ai, as its users write them."""

from __future__ import annotations

from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, choice, match, scorer
from inspect_ai.solver import generate, multiple_choice, self_critique, system_message

SUMS = [Sample(input=f"{k}+{k}", target=str(2 * k), id=k) for k in range(30)]


@task
def sums(twice: bool = False) -> Task:
    solver = [system_message("Add."), generate(), *([self_critique()] if twice else [])]
    return Task(dataset=SUMS, solver=solver, scorer=[match(numeric=True), near()])


@task
def lettered() -> Task:
    samples = [
        Sample(input=f"Which is {k}?", choices=[str(k + 1), str(k), str(k + 2)], target="B")
        for k in range(30)
    ]
    return Task(dataset=samples, solver=multiple_choice(), scorer=choice())


@scorer(metrics=[accuracy()])
def near() -> Any:
    async def score(state: Any, target: Any) -> Score:
        said = state.output.completion
        if said == "crash":
            raise ValueError("no number")
        return Score(value={"near": 0.5, "far": 3.0}, answer=said)

    return score
