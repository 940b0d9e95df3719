"""A tiny assistant that has learned to guess more often than to ask learns that asking satisfies its user."""

from __future__ import annotations

import pytest

import kapelle
from kapelle.algorithms import GRPO
from kapelle.environments import UserConversation
from kapelle.workflows import PlayWorkflow


@pytest.mark.long
def test_satisfaction_grows_with_questions() -> None:
    trainer = kapelle.Trainer(
        model={
            "embedded": {
                "hidden": 64,
                "layers": 2,
                "heads": 4,
                "kv_heads": 2,
                "intermediate": 128,
                "context": 384,
            }
        },
        team={"agents": ({"name": "assistant"},), "sampling": {"max_tokens": 32}},
        environment=UserConversation(
            errands=("table",),
            difficulty=(1, 2),
            things=2,
            personas=("open",),
            max_turns=4,
            view="latest",
            wording="short",
            flaws={"assistant": 0.75},
        ),
        workflow=PlayWorkflow(memory="conversation"),
        algorithm=GRPO(group_size=8),
        warmup={"steps": 300, "demonstrations": 800},
        optimizer={"lr": 3e-3},
        training={"tasks_per_step": 12},
        evaluation={"problems": 100},
    )
    with trainer:
        before = trainer.evaluate(greedy=True).success
        for _ in trainer.steps(40):
            pass
        after = trainer.evaluate(greedy=True).success
    assert before is not None
    assert after is not None
    assert after > before + 0.3, (before, after)
