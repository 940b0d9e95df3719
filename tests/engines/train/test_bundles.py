"""What belongs together stays together, however small passes and steps are."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kapelle.engines.train.batch import minibatches, passes
from kapelle.rows import Sample


def drawn(shape: Sequence[tuple[str, int | None, int]]) -> list[Sample]:
    """One sample per (learner, bundle, length)."""
    return [
        Sample(learner, tuple(range(length)), (length - 1,), bundle=bundle)
        for learner, bundle, length in shape
    ]


def mates(samples: Sequence[Sample]) -> list[set[int]]:
    found: dict[tuple[str, int], set[int]] = {}
    for k, sample in enumerate(samples):
        if sample.bundle is not None:
            found.setdefault((sample.learner, sample.bundle), set()).add(k)
    return list(found.values())


SHAPES = st.lists(
    st.tuples(st.sampled_from("ab"), st.none() | st.integers(0, 3), st.integers(2, 9)),
    min_size=1,
    max_size=20,
)


@given(shape=SHAPES, limit=st.integers(1, 40))
def test_a_pass_has_whole_bundles_and_every_sample_once(
    shape: list[tuple[str, int | None, int]], limit: int
) -> None:
    samples = drawn(shape)
    pieces = passes(range(len(samples)), samples, limit)
    assert sorted(k for piece, _ in pieces for k in piece) == list(range(len(samples)))
    for together in mates(samples):
        assert sum(bool(together & set(piece)) for piece, _ in pieces) == 1
    if mates(samples):
        for piece, room in pieces:
            assert sum(len(samples[k].tokens) for k in piece) == room
            alone = len({(samples[k].learner, samples[k].bundle) for k in piece}) == 1
            assert room <= limit or alone


def test_passes_by_hand() -> None:
    samples = drawn([("a", 0, 4), ("a", 1, 3), ("a", 0, 4), ("a", None, 2), ("a", 1, 3)])
    assert passes(range(5), samples, 8) == [([0, 2], 8), ([1, 4, 3], 8)]
    assert passes([1, 4], samples, 2) == [([1, 4], 6)]
    assert passes([3], samples, 2) == [([3], 2)]


@given(shape=SHAPES, parts=st.integers(1, 4))
def test_a_step_has_whole_bundles_and_every_sample_once(
    shape: list[tuple[str, int | None, int]], parts: int
) -> None:
    samples = drawn(shape)
    split = minibatches(samples, parts, {sample.learner: 1 for sample in samples})
    assert sorted(k for chosen in split for k in chosen) == list(range(len(samples)))
    for together in mates(samples):
        assert sum(bool(together & set(chosen)) for chosen in split) == 1
