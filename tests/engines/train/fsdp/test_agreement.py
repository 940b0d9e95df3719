"""What breaks in the part of the weights that one rank holds is omitted, or stops the run, in all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines.train.fsdp.test_engine import NLL, setup
from tests.support.ranks import Raised, run_ranks
from tests.support.tiny import related_samples, tiny_model, with_behaviour

from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.fsdp import FsdpTrainEngine
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.settings import Fsdp
from kapelle.runtime.rank_group import ranks_here
from kapelle.team import Policy


def updated(mode: str) -> tuple[dict[str, float], bool]:
    """Take a step, break a moment in the part of rank 1, and take another one."""
    ranks = ranks_here(60.0)
    limits = UpdateLimits(microbatch_tokens=20, non_finite=mode)
    engine = FsdpTrainEngine(setup(Policy("a"), ranks=ranks, limits=limits))
    objective = replace(NLL, parity=False)
    engine.update(related_samples(["a"]), objective)
    learner: Any = engine.learners["a"]
    if ranks.rank == 1:
        moments = learner.optimizer.state[list(learner.parameters.values())[1]]
        moments["exp_avg"].to_local().view(-1)[0] = float("inf")
    row = engine.update(related_samples(["a"]), objective)
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in engine.weights("a").values())
    return row, finite


@pytest.mark.slow
def test_an_update_that_breaks_the_part_of_one_rank_is_excluded_by_all() -> None:
    (row, finite), (other, others) = run_ranks(2, updated, "skip")
    assert row == other
    assert (row["skipped/a"], row["undone/a"]) == (1.0, 1.0)
    assert finite
    assert others


@pytest.mark.ranks
def test_or_it_stops_all_with_the_same_reason() -> None:
    one, other = run_ranks(2, updated, "stop")
    assert isinstance(one, Raised)
    assert one == other
    assert (
        "NumericsError: The update 1 of 'a' at a learning rate of 0.01 broke its weights: 1 of the 128 numbers"
        in one
    )


def scaled() -> list[tuple[float, float, float]]:
    """Take steps in float16 of which the first has gradients that overflow, in the samples of one rank alone."""
    ranks = ranks_here(60.0)
    limits = UpdateLimits(microbatch_tokens=20, parity_tolerance=100.0)
    half = {"base": tiny_model(dtype="float16", size=0.1)}
    engine = FsdpTrainEngine(setup(Policy("a"), ranks=ranks, limits=limits, models=half))
    state = engine.state()
    state["learners"]["a"]["scaler"]["scale"] = 2.0**10
    engine.load_state(state)
    told = []
    for loudest in (1e6, 1.0):
        drawn = with_behaviour(engine, related_samples(["a"]))
        drawn[0].columns["advantage"].mul_(loudest)
        row = engine.update(drawn, Objective(SurrogateConfig().build(), parity=False))
        scale = engine.state()["learners"]["a"]["scaler"]["scale"]
        moved = sum(float(tensor.detach().double().sum()) for tensor in engine.weights("a").values())
        told.append((row["skipped/a"], scale, moved))
    return told


@pytest.mark.slow
def test_a_gradient_that_overflows_in_one_rank_is_excluded_by_all_and_lowers_their_scale() -> None:
    one, other = run_ranks(2, scaled)
    assert one == other
    (skipped, lowered, before), (later, kept, after) = one
    assert (skipped, lowered) == (1.0, 2.0**9)
    assert (later, kept) == (0.0, 2.0**9)
    assert before != after


def spread(split: int) -> dict[str, int]:
    """Return how many tokens the histograms of an update hold, of ranks with unequal shares."""
    made = setup(Policy("a"), ranks=ranks_here(60.0), models={"base": tiny_model(kv_heads=2)})
    engine = FsdpTrainEngine(made, Fsdp(tensor_parallel=split))
    engine.update(with_behaviour(engine, related_samples(["a"])), replace(NLL, parity=False))
    return {name: sum(each.counts) for name, each in engine.distributions().items()}


@pytest.mark.ranks
@pytest.mark.parametrize("split", [1, 2])
def test_every_token_is_in_the_histograms_once(split: int) -> None:
    tokens = sum(len(each.targets) for each in related_samples(["a"]))
    expected = {"update_entropy/a": tokens, "update_log_ratio/a": tokens}
    assert run_ranks(2, spread, split) == [expected, expected]
