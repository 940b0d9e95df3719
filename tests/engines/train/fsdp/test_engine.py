"""A base that is shared out over processes learns and says what a whole one does; here over a group of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.support.ranks import free_port
from tests.support.tiny import (
    LORA,
    frozen_copy,
    related_samples,
    same_bits,
    stir,
    tiny_model,
    with_behaviour,
)
from torch.distributed.tensor import DTensor

from kapelle.algorithms.sft import negative_log_likelihood
from kapelle.engines.train.fsdp import FsdpTrainEngine
from kapelle.engines.train.protocol import Objective, TrainEngine, TrainSetup, UpdateLimits
from kapelle.engines.train.settings import Fsdp
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.errors import ConfigError
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.weights import save_model, weights_hash
from kapelle.runtime.rank_group import RankGroup
from kapelle.runtime.ranks import LaunchedRank
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Policy, reference_name

NLL = Objective(negative_log_likelihood)
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def group() -> Iterator[RankGroup]:
    made = RankGroup(LaunchedRank(0, 1, "127.0.0.1", free_port(), 0), 30.0)
    yield made
    made.leave()


def setup(policy: Policy, **over: Any) -> TrainSetup:
    optimizer, limits = OptimizerConfig(lr=1e-2, eps=1e-4), UpdateLimits(microbatch_tokens=20)
    return replace(TrainSetup({"base": tiny_model()}, [policy], [], optimizer, limits, 0), **over)


def learned(engine: TrainEngine, policy: Policy) -> dict[str, Any]:
    if policy.lora is not None:
        stir(engine.weights("a"), 1)
    samples = with_behaviour(engine, related_samples(["a"]))
    for _ in range(2):
        engine.update(samples, replace(NLL, parity=False))
    return {"scores": engine.score(samples), "weights": frozen_copy(engine.weights("a"))}


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("lora", [LORA, None])
def test_it_learns_the_same_as_the_whole_base(group: RankGroup, lora: Any, tmp_path: Any) -> None:
    policy = Policy("a", lora=lora)
    sharded = FsdpTrainEngine(setup(policy, ranks=group))
    one, other = learned(sharded, policy), learned(TorchTrainEngine(setup(policy)), policy)
    for name, tensor in one["weights"].items():
        assert float((tensor - other["weights"][name]).abs().max()) < ROUNDING
    for here, there in zip(one["scores"], other["scores"], strict=True):
        assert float((here - there).abs().max()) < 1e-5
    if lora is None:
        assert any(isinstance(p, DTensor) for p in sharded.learners["a"].parameters.values())
        model = sharded._engine.model_of("a")
        held = weights_hash(model.base_parameters())
        save_model(tmp_path, model)
        assert weights_hash(model.base_parameters()) == held


@pytest.mark.sample(2)
@pytest.mark.parametrize("lora", [LORA, None])
def test_its_state_is_whole_and_goes_to_the_engine_torch_and_back(group: RankGroup, lora: Any) -> None:
    policy = Policy("a", lora=lora)
    sharded, plain = FsdpTrainEngine(setup(policy, ranks=group)), TorchTrainEngine(setup(policy))
    learned(sharded, policy)
    state: Any = sharded.state()
    plain.load_state(state)
    assert same_bits(plain.state(), state)
    assert same_bits(plain.weights("a"), sharded.weights("a"))
    again = FsdpTrainEngine(setup(policy, ranks=group))
    again.load_state(plain.state())
    assert same_bits(again.state(), state)
    assert same_bits(again.weights("a"), sharded.weights("a"))
    doubled = {name: tensor.detach() * 2 for name, tensor in sharded.weights("a").items()}
    again.load_weights("a", doubled)
    assert same_bits(again.weights("a"), doubled)
    assert list(again.publish()) == ["a"]


def test_models_that_cannot_be_sharded(group: RankGroup) -> None:
    eight_bit = OptimizerConfig(name="adamw_8bit")
    with pytest.raises(ConfigError, match=r"'a' trains all weights .* `optimizer.name: adamw`"):
        Fsdp().build(setup(Policy("a"), ranks=Two(), optimizer=eight_bit))
    with pytest.raises(
        ConfigError, match=r"`train_engine.tensor_parallel: 3` does not divide the 2 processes"
    ):
        Fsdp(tensor_parallel=3).build(setup(Policy("a"), ranks=Two()))
    with pytest.raises(ConfigError, match=r"tensor_parallel: 2` needs models that train all .* 'a' does not"):
        Fsdp(tensor_parallel=2).build(setup(Policy("a", lora=LORA), ranks=Two()))
    assert isinstance(Fsdp(tensor_parallel=2).build(setup(Policy("a"))), TorchTrainEngine)


def test_a_reference_stays_shared_out_and_follows_its_policy_when_it_is_refreshed(group: RankGroup) -> None:
    policy, name = Policy("a"), reference_name("a")
    sharded = FsdpTrainEngine(setup(policy, ranks=group, references=True))
    plain = TorchTrainEngine(setup(policy, references=True))
    begun = frozen_copy(plain.weights("a"))
    asked = [replace(sample, learner=name) for sample in related_samples(["a"])]
    for engine in (sharded, plain):
        learned(engine, policy)
        assert same_bits(frozen_copy(engine.weights(name)), begun)
    held = sharded._engine.weights(name)
    assert all(isinstance(tensor, DTensor) for tensor in held.values())
    for here, there in zip(sharded.score(asked), plain.score(asked), strict=True):
        assert float((here - there).abs().max()) < 1e-5
    sharded.refresh_references()
    assert same_bits(dict(sharded.weights(name)), frozen_copy(sharded.weights("a")))
    sharded.load_weights(name, begun)
    assert same_bits(dict(sharded.weights(name)), begun)
    state: Any = sharded.state()
    plain.load_state(state)
    assert same_bits(plain.state(), state)
    again = FsdpTrainEngine(setup(policy, ranks=group, references=True))
    again.load_state(sharded.parts())
    assert same_bits(again.state(), state)
    saved = state["references"][name]["model.norm.weight"]
    room = again.room(f"references.{name}.model.norm.weight", saved.to("meta"))
    assert isinstance(room, DTensor)


def test_weights_are_gathered_in_the_type_that_is_set_and_kept_in_float32(group: RankGroup) -> None:
    policy = Policy("a")
    with pytest.raises(ConfigError, match="param_dtype"):
        Fsdp(param_dtype="bfloat16").build(setup(policy, ranks=Two()))
    half = {"base": tiny_model(dtype="bfloat16")}
    sharded = FsdpTrainEngine(setup(policy, ranks=group, models=half), Fsdp(param_dtype="bfloat16"))
    begun = sharded.score(related_samples(["a"]))
    learned(sharded, policy)
    assert {tensor.dtype for tensor in sharded.weights("a").values()} == {torch.bfloat16}
    state: Any = sharded.state()
    for name, tensor in state["learners"]["a"]["weights"].items():
        assert tensor.dtype == state["learners"]["a"]["optimizer"][name]["exp_avg"].dtype == torch.float32
        assert same_bits(tensor.to(torch.bfloat16), frozen_copy(sharded.weights("a"))[name])
    plain = TorchTrainEngine(setup(policy, models={"base": tiny_model(dtype="bfloat16")}))
    for here, there in zip(begun, plain.score(related_samples(["a"])), strict=True):
        assert float((here - there).abs().max()) < 0.2  # embeddings and norms are rounded too
    plain.load_state(state)
    assert same_bits(plain.state(), state)


@pytest.mark.parametrize("gives_back", [True, False])
def test_a_block_frees_its_weights_after_its_forward_pass_if_configured(
    group: RankGroup, gives_back: bool
) -> None:
    model, tokens_N = tiny_model(), torch.arange(3)
    engine = FsdpTrainEngine(
        setup(Policy("a"), ranks=group, models={"base": model}), Fsdp(reshard_after_forward=gives_back)
    )
    with engine._sharded(), torch.no_grad(), model.computing([(None, 0, 3)]):
        model.hidden(tokens_N, tokens_N, plan_sequences([3]))
        assert isinstance(model.model.model.layers[0].mlp.up_proj.weight, DTensor) is gives_back
        assert not isinstance(model.head.weight_VD, DTensor)


class Two:
    """Ranks that never meet."""

    rank, size = 0, 2
    together = add = None
