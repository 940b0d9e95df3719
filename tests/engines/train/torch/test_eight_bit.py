"""Optimisers of bitsandbytes: named before anything is loaded where they cannot work, and plugged in where they can.

The library needs CUDA. Here a substitute with its interface and the shape of its state takes its place.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    draw_samples,
    frozen_copy,
    same_bits,
    tiny_model,
    train_engine,
    with_behaviour,
)

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective
from kapelle.engines.train.torch.learner import OF_BITSANDBYTES
from kapelle.errors import CheckpointError
from kapelle.team import Policy

OBJECTIVE = Objective(SurrogateConfig().build())


class InBytes(torch.optim.Optimizer):
    """Signs of the moments' mean, one byte each: not AdamW, but its state is as bitsandbytes keeps it."""

    def __init__(self, parameters: Any, **settings: Any) -> None:
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                entry = self.state[parameter]
                before = entry.get("state1", torch.zeros_like(parameter, dtype=torch.uint8))
                entry["step"] = entry.get("step", 0) + 1
                entry["state1"] = (before + parameter.grad.sign().add(1).to(torch.uint8)) % 200
                parameter.sub_(group["lr"] * (entry["state1"].float() / entry["step"] - 1))

    def load_state_dict(self, state_dict: Any) -> None:
        # As bitsandbytes: torch's own would turn bytes into the type of the weights.
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            if number in state_dict["state"]:
                self.state[parameter] = dict(state_dict["state"][number])


@pytest.fixture
def bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    optim = SimpleNamespace(AdamW8bit=InBytes, PagedAdamW8bit=InBytes)
    monkeypatch.setitem(sys.modules, "bitsandbytes", SimpleNamespace(optim=optim, __spec__=object()))


def step(engine: Any) -> None:
    engine.update(with_behaviour(engine, draw_samples(["whole"], [(3, 5), (7, 2)])), OBJECTIVE)


class TestRefused:
    @pytest.mark.usefixtures("bitsandbytes")
    def test_moments_of_another_optimiser(self) -> None:
        plain, narrow = (
            train_engine([Policy("whole")], models={"base": tiny_model()}, name=name)
            for name in ("adamw", "adamw_8bit")
        )
        step(plain)
        with pytest.raises(
            CheckpointError, match=r"'whole' \(exp_avg, .*does not belong to `optimizer.name: adamw_8bit`"
        ):
            narrow.load_state(plain.state())
        step(narrow)
        with pytest.raises(
            CheckpointError, match=r"\(state1, step\) does not belong to `optimizer.name: adamw`"
        ):
            plain.load_state(narrow.state())


@pytest.mark.usefixtures("bitsandbytes")
@pytest.mark.parametrize("name", sorted(OF_BITSANDBYTES))
def test_their_state_is_saved_and_continues_exactly(name: str) -> None:
    engine, other = (
        train_engine([Policy("whole")], models={"base": tiny_model()}, name=name) for _ in range(2)
    )
    before = frozen_copy(engine.weights("whole"))
    step(engine)
    assert not same_bits(before, frozen_copy(engine.weights("whole")))
    state: Any = engine.state()
    kept = state["learners"]["whole"]["optimizer"]
    assert {entry["state1"].dtype for entry in kept.values()} == {torch.uint8}
    other.load_state(state)
    for each in (engine, other):
        step(each)
    assert same_bits(engine.state(), other.state())
