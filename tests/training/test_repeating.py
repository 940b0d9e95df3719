"""A run repeats bitwise whatever its episode states wait for: it is the run in which they do not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny import same_bits, sections, tiny_model
from tests.training.test_trainer_resume import remains

from kapelle.setup.recipe import resolve
from kapelle.training.trainer import Trainer

BASE: dict[str, Any] = {
    # Answers outlast several pauses of the sampler and end at many different places.
    "team": {"agents": 2, "lora": {"rank": 2, "alpha": 4.0}, "sampling": {"max_tokens": 40}},
    "algorithm": {"name": "grpo", "group_size": 4},
    "training": {"steps": 2, "tasks_per_step": 3},
    "evaluation": {"problems": 4, "every": 2, "problems_while_training": 4, "before_and_after": False},
    "checkpoint": {"every": 1, "keep": 1},
    "workflow": {"name": "tests.support.waiting:Rounds", "rounds": 3},
}

KINDS: dict[str, dict[str, Any]] = {
    "who falls silent early": {},
    "each its own way": {"workflow": {"name": "tests.support.waiting:Rounds", "rounds": 3, "apart": True}},
    "scores of a debate": {"workflow": {"name": "debate", "score_rounds": True}},
    "a tree": {"algorithm": {"name": "at_grpo", "group_size": 2, "tree": True}},
    "ahead of the update": {"training": {"steps": 2, "tasks_per_step": 3, "max_staleness": 1}},
    "few rows": {"engine": {"name": "local", "max_rows": 5}},
    "two models": {
        "team": {
            "agents": [{"name": "ada"}, {"name": "ben", "weights": {"model": "other", "train": "full"}}],
            "lora": {"rank": 2, "alpha": 4.0},
            "sampling": {"max_tokens": 40},
        }
    },
}


def trained(run: Path, wait: str = "not", **over: Any) -> dict[str, Any]:
    """Train with an episode state that waits in this way and return what remains, settings aside."""
    world = {"name": "tests.support.waiting:Waiting", "tasks": 6, "kind": wait}
    config = resolve(sections(**{**BASE, "environment": world, **over}))
    with Trainer(config, models={"other": tiny_model(seed=3)}, run_dir=run) as trainer:
        trainer.train()
    found = remains(run)
    return {part: found[part] for part in ("policies", "metrics", "evaluations", "episodes")}


@pytest.mark.sample(8)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_worlds_that_wait_change_nothing(kind: str, tmp_path: Path) -> None:
    quick = trained(tmp_path / "quick", "not", **KINDS[kind])
    slow = trained(tmp_path / "slow", "mixed", **KINDS[kind])
    for part, expected in quick.items():
        assert same_bits(slow[part], expected), part
