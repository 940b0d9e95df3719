"""An environment of four methods is complete."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pytest
from tests.support.tiny import sections

from kapelle.environments import BaseEnvironment, BaseState
from kapelle.training.trainer import Trainer
from kapelle.types import Split, Task


class Longer(BaseEnvironment):
    """Rewards the longest text."""

    name: Literal["tests.environments.test_base:Longer"] = "tests.environments.test_base:Longer"

    @property
    def sources(self) -> Mapping[Split, str]:
        return {"train": "numbers below 1000", "test": "numbers from 1000"}

    def task(self, split: Split, index: int) -> Task:
        number = random.Random(index).randrange(1000) + 1000 * (split == "test")
        return Task(f"{split}-{index}", f"{number}:")

    def start(self, task: Task, agents: Sequence[str], seed: int) -> LongerState:
        return LongerState(task, agents)


class LongerState(BaseState):
    async def step(self, actions: Mapping[str, str], final: str | None = None) -> Mapping[str, float]:
        most = max(map(len, actions.values()))
        self.rewards = {agent: float(len(text) == most > 0) for agent, text in actions.items()}
        self.over = True
        return {}


def test_a_team_trains_on_it() -> None:
    with Trainer(**sections(environment=Longer(), workflow={"name": "play"})) as made:
        [step] = made.steps(1)
    assert step.metrics["failed_episodes"] == 0.0
    assert 0.0 <= step.metrics["return/agent_0"] <= 1.0


@pytest.mark.parametrize(
    ("field", "annotation", "kind"),
    [("reward_range", tuple[float, float], "property"), ("size", int, "method"), ("task", str, "method")],
)
@pytest.mark.filterwarnings("ignore:Field name .* shadows:UserWarning")
def test_a_setting_with_the_name_of_a_method_is_an_error(field: str, annotation: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"{field}.* as a {kind}"):
        type("Wrong", (Longer,), {"__annotations__": {field: annotation}, "__module__": __name__})
