"""What breaks in the part of the weights that one rank holds is left out, or stops the run, in all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engines.train.fsdp.test_engine import NLL, setup
from tests.support.ranks import Raised, run_ranks
from tests.support.tiny import related_samples

from kapelle.engines.train.fsdp import FsdpTrainEngine
from kapelle.engines.train.protocol import UpdateLimits
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
        moments = learner._optimizer.state[list(learner.parameters.values())[1]]
        moments["exp_avg"].to_local().view(-1)[0] = float("inf")
    row = engine.update(related_samples(["a"]), objective)
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in engine.weights("a").values())
    return row, finite


@pytest.mark.slow
def test_an_update_that_breaks_the_part_of_one_rank_is_left_out_by_all() -> None:
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
        "NumericsError: The update 1 of 'a' at a rate of 0.01 broke its weights: 1 of the 128 numbers" in one
    )
