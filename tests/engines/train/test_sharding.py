"""Ranks get equal tokens, not equal rows; what belongs together stays together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny import draw_samples, related_samples

from kapelle.engines.train.batch import pack, shard_samples
from kapelle.rows import Sample

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=30)


def tokens(samples: list[Sample], sharded: list[list[int]]) -> list[int]:
    return [sum(len(samples[k].tokens) for k in own) for own in sharded]


@settings(max_examples=30)
@given(LENGTHS, st.integers(1, 5))
def test_each_sample_goes_to_one_rank_and_ranks_are_balanced(
    lengths: list[tuple[int, int]], ranks: int
) -> None:
    samples = draw_samples(["a", "b"], lengths)
    sharded = shard_samples(samples, ranks)
    assert sorted(k for own in sharded for k in own) == list(range(len(samples)))
    filled = tokens(samples, sharded)
    assert max(filled) - min(filled) <= max(len(sample.tokens) for sample in samples)


def test_samples_that_a_loss_compares_stay_on_one_rank() -> None:
    drawn = draw_samples(["a"], [(3, 2)] * 6)
    pairs = [replace(sample, bundle=k // 2) for k, sample in enumerate(drawn)]
    for own in shard_samples(pairs, 2):
        assert all(own.count(k ^ 1) == 1 for k in own)


def test_the_answers_to_one_prompt_go_to_all_where_there_is_no_other() -> None:
    prompt = tuple(range(10, 20))
    drawn = draw_samples(["a"], [(10, 6)] * 8)
    samples = [replace(sample, tokens=prompt + sample.tokens[10:]) for sample in drawn]
    assert [len(own) for own in shard_samples(samples, 2)] == [4, 4]


def test_each_pass_over_answers_to_one_prompt_is_within_the_limit() -> None:
    drawn = draw_samples(["a"], [(10, 5)] * 6)
    samples = [replace(sample, tokens=(*range(10), *sample.tokens[10:])) for sample in drawn]
    # The prompt, and two answers without their last tokens.
    assert [len(batch.tokens) for batch in pack(samples, 18)] == [10 + 2 * 4] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_shared_computations_are_assigned_once(ranks: int) -> None:
    samples = related_samples(["a"])
    sharded = shard_samples(samples, ranks)
    holder = {k: rank for rank, own in enumerate(sharded) for k in own}
    assert holder[0] == holder[2]  # the same answer
    assert holder[0] == holder[5]  # and the turn that continues from it
