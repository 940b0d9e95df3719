"""Orders as a single-turn `verifiers` environment: `vf.load_environment("vf-orders")`."""

from typing import Any

import verifiers as vf
from datasets import Dataset
from orders import ITEMS, asked, named, polite


def names_it(completion: Any, answer: str) -> float:
    """Reward the correct item."""
    return named(completion[-1]["content"], answer)


def thanks(completion: Any) -> float:
    """Reward politeness."""
    return polite(completion[-1]["content"])


def load_environment() -> vf.Environment:
    """Return the environment; its rubric gives half of the reward for each of two criteria."""
    train, test = (
        Dataset.from_list([{"question": asked(item), "answer": item} for item in items])
        for items in (ITEMS[4:], ITEMS[:4])
    )
    rubric = vf.Rubric(funcs=[names_it, thanks], weights=[0.5, 0.5])
    return vf.SingleTurnEnv(dataset=train, eval_dataset=test, rubric=rubric)
