"""Gradient checkpointing: the same step bitwise, from less memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from tests.support.tiny import (
    SIZE,
    draw_samples,
    frozen_copy,
    same_bits,
    tiny_model,
    train_engine,
    with_behaviour,
    with_columns,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kapelle.algorithms.shared.surrogate import SurrogateConfig, ValueLossConfig
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.models.language_model import load_language_model
from kapelle.settings.schema import EmbeddedConfig, ModelConfig
from kapelle.team import Critic, Lora, Policy

OBJECTIVE = Objective(SurrogateConfig().build(), ValueLossConfig().build(), 0.5)
LORA = Lora(rank=2, alpha=4.0, dropout=0.2)


def updated(*, checkpointed: bool, dtype: str, padded: bool) -> dict[str, dict[str, Tensor]]:
    """Weights of two adapters with dropout, a critic and a whole model after two updates in several passes."""
    models = {"base": tiny_model(dtype=dtype, size=0.1), "own": tiny_model(1, dtype=dtype, size=0.1)}
    for model in models.values():
        model.flat = None if padded else model.flat
    policies = [Policy("a", lora=LORA), Policy("b", lora=LORA), Policy("whole", base="own")]
    limits = UpdateLimits(microbatch_tokens=40, gradient_checkpointing=checkpointed)
    engine = train_engine(policies, [Critic("v", lora=LORA)], models=models, limits=limits, eps=1e-3)
    samples = draw_samples(["a", "b", "whole"], [(3, 5), (7, 2), (3, 5)])
    values = draw_samples(["v"], [(3, 5)])
    values = with_columns(values, **{"return": [torch.ones(5)], "value": [torch.zeros(5)]})
    for _ in range(2):
        engine.update(with_behaviour(engine, samples) + values, OBJECTIVE)
    return {name: frozen_copy(engine.weights(name)) for name in ("a", "b", "whole", "v")}


@pytest.mark.sample(4)
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["flat", "transformers"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_takes_the_same_step_exactly(dtype: str, padded: bool) -> None:
    plain, again = (updated(checkpointed=on, dtype=dtype, padded=padded) for on in (False, True))
    assert same_bits(plain, again)


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside and still held by something."""

    def __init__(self) -> None:
        super().__init__()
        self.now: int = 0
        self.most: int = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self.note(tensor.untyped_storage())
        return made

    def note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self.gone, key, size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def most_held(layers: int, *, checkpointed: bool, padded: bool = False) -> int:
    """Peak of bytes in an update of an adapter on a model of so many layers."""
    size = EmbeddedConfig.model_validate({**SIZE, "layers": layers})
    model = load_language_model(ModelConfig(embedded=size))
    model.flat = None if padded else model.flat
    limits = UpdateLimits(gradient_checkpointing=checkpointed)
    policy = Policy("a", lora=Lora(rank=1, targets=("q_proj",)))
    engine = train_engine([policy], models={"base": model}, limits=limits)
    samples = with_behaviour(engine, draw_samples(["a"], [(100, 100)] * 4))
    live = Live()
    with live:
        engine.update(samples, OBJECTIVE)
    return live.most


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["flat", "transformers"])
def test_an_additional_layer_costs_only_its_input(padded: bool) -> None:
    """800 tokens of 16 numbers of four bytes; 5 kB of the generator's state and an adapter's moments come on top."""
    stream = 800 * 16 * 4
    each, plainly = (
        (most_held(12, checkpointed=on, padded=padded) - most_held(4, checkpointed=on, padded=padded)) / 8
        for on in (True, False)
    )
    assert stream <= each < 1.3 * stream
    assert plainly > 8 * stream
