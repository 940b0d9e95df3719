"""Orders as an inspect_ai task: `examples/worlds/inspect_orders.py:orders`."""

import sys
from pathlib import Path
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, mean, scorer
from inspect_ai.solver import generate, prompt_template

sys.path.insert(0, str(Path(__file__).parent))
from orders import ITEMS, named, polite


@task
def orders() -> Task:
    """Return the task."""
    samples = [Sample(input=item, target=item) for item in ITEMS]
    return Task(dataset=samples, solver=[prompt_template("Order: {prompt}"), generate()], scorer=good_words())


@scorer(metrics=[mean()])
def good_words() -> Any:
    """Give half of the reward for the correct item and half for politeness."""

    async def score(state: Any, target: Any) -> Score:
        said = state.output.completion
        return Score(value=(named(said, target.text) + polite(said)) / 2, answer=said)

    return score
