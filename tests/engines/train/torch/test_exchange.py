"""Two learners change places: weights, moments, counters, bitwise, under versions that name nothing else."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from tests.support.tiny import draw_samples, lora_policies, same_bits, train_engine, with_behaviour

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective
from kapelle.engines.train.torch.engine import TorchTrainEngine

OBJECTIVE = Objective(SurrogateConfig().build())
Places = tuple[TorchTrainEngine, dict[str, dict[str, Any]]]


def trained(engine: TorchTrainEngine, name: str, times: int) -> None:
    for k in range(times):
        engine.update(with_behaviour(engine, draw_samples([name], [(4, 3)], seed=k)), OBJECTIVE)


@pytest.fixture
def places() -> Places:
    """Two policies of unlike age, and their states before they change places."""
    engine = train_engine(lora_policies("a", "b"), references=True)
    trained(engine, "a", 3)
    trained(engine, "b", 1)
    engine.publish()
    return engine, {name: deepcopy(engine.learners[name].state()) for name in "ab"}


def test_optimiser_state_travels_with_the_weights(places: Places) -> None:
    engine, before = places
    engine.exchange("a", "b")
    for name, other in (("a", "b"), ("b", "a")):
        state = engine.learners[name].state()
        assert same_bits(state["optimizer"], before[other]["optimizer"])
        assert (state["steps"], before[name]["steps"]) == (before[other]["steps"], {"a": 3, "b": 1}[name])


def test_an_exchanged_learner_continues_as_the_other(places: Places) -> None:
    engine, _ = places
    other = train_engine(lora_policies("a", "b"), references=True)
    other.load_state(deepcopy(engine.state()))
    engine.exchange("a", "b")
    trained(engine, "a", 1)
    trained(other, "b", 1)
    assert same_bits(engine.learners["a"].state()["optimizer"], other.learners["b"].state()["optimizer"])
