"""A token's key is that of its learner and of the tokens up to it, wherever it is computed."""

from __future__ import annotations

from tests.support.tiny import related_samples

from kapelle.engines.train.batch import Batch, pack, token_keys

SEEDS = {"a": 7, "b": 8}
Path = tuple[str, tuple[int, ...]]


def by_path(batch: Batch) -> dict[Path, int]:
    """Return every token's key by its learner and the tokens up to it."""
    keys, tokens = token_keys(batch, SEEDS).tolist(), batch.tokens_N.tolist()
    owner = [name for name, first, last in batch.owners for _ in range(first, last)]
    found: dict[Path, int] = {}
    for start, length, prefix in batch.spans:
        before = [] if prefix is None else tokens[prefix[0] : sum(prefix)]
        for place in range(start, start + length):
            path = (owner[place], (*before, *tokens[start : place + 1]))
            assert found.setdefault(path, keys[place]) == keys[place]
    return found


def test_they_are_the_same_in_any_pass() -> None:
    samples = related_samples(["a", "b"])
    [whole] = pack(samples, 10_000)
    expected = by_path(whole)
    assert len(set(expected.values())) == len(expected)
    for budget, share in ((1, True), (17, True), (10_000, False)):
        found: dict[Path, int] = {}
        for batch in pack(samples, budget, share=share):
            found |= by_path(batch)
        assert found == expected


def test_what_different_prompts_have_in_common_is_computed_once() -> None:
    alike = related_samples(["a"])[-3:]
    [shared] = pack(alike, 10_000)
    [separate] = pack(alike, 10_000, share=False)
    assert len(separate.tokens_N) - len(shared.tokens_N) == 2 * 18
