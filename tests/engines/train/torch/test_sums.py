"""What an update says of its policies' tokens, by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.support.ranks import run_ranks
from tests.support.tiny import draw_samples, lora_policies, train_engine, with_columns
from torch import Tensor

from kapelle.algorithm import Targets
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective, UpdateLimits
from kapelle.engines.train.torch.sharing import AmongRanks, UpdateSums, means
from kapelle.functional.distributions import Histogram, histogram
from kapelle.functional.divergences import TokenStatistics
from kapelle.rows import Column, Sample
from kapelle.runtime.rank_group import ranks_here


def watched(ratios: list[float], mask: list[float] | None = None) -> dict[str, float]:
    behaviour_K = torch.full((len(ratios),), -2.0)
    said = TokenStatistics(behaviour_K + torch.tensor(ratios).log(), torch.arange(len(ratios)).float())
    mask_K = torch.tensor(mask or [1.0] * len(ratios))
    segment_K = torch.zeros(len(ratios), dtype=torch.int64)
    sums = UpdateSums()
    sums.add_statistics("a", said, Targets(segment_K, 1, mask_K, {"behaviour": behaviour_K}))
    sums.read()
    return means(sums.sums["a"])


def test_ratios_to_the_sampler_by_hand() -> None:
    # (1 + 2.5 + 0.25 + 0.25)² / (4·(1 + 6.25 + 0.0625 + 0.0625)) = 16 / 29.5; three of four beyond a factor of 2.
    assert watched([1.0, 2.5, 0.25, 0.25]) == pytest.approx(
        {"entropy/a": 1.5, "ratio_tail/a": 0.75, "effective_samples/a": 16 / 29.5}
    )


def test_tokens_that_do_not_count_have_no_part() -> None:
    assert watched([1.0, 1.0, 9.0], [1.0, 1.0, 0.0]) == pytest.approx(
        {"entropy/a": 0.5, "ratio_tail/a": 0.0, "effective_samples/a": 1.0}
    )


def test_they_do_not_depend_on_how_a_batch_is_split() -> None:
    rows = []
    for tokens in (4096, 8):
        engine = train_engine(lora_policies("a"), limits=UpdateLimits(microbatch_tokens=tokens))
        drawn = draw_samples(["a"], [(4, 3), (5, 2), (3, 4)])
        apart = [logp_T + 0.5 * k for k, logp_T in enumerate(engine.score(drawn))]
        objective = Objective(SurrogateConfig().build(), parity=False)
        rows.append(engine.update(with_columns(drawn, behaviour=apart), objective))
    assert 0.1 < rows[0]["effective_samples/a"] < 0.99
    for name in ("entropy/a", "ratio_tail/a", "effective_samples/a"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5)


# -------- How tokens are distributed: histograms of all tokens that count, whatever passes and processes they are in


def moved() -> list[Sample]:
    """Return samples of two policies that others have sampled, with tokens that do not count."""
    engine = train_engine(lora_policies("a", "b"))
    drawn = draw_samples(["a", "b"], [(4, 30), (5, 20), (3, 40)])
    apart = [logp_T + 0.3 * k - 0.4 for k, logp_T in enumerate(engine.score(drawn))]
    masks = [torch.arange(len(logp_T)) % 3 != k % 2 for k, logp_T in enumerate(apart)]
    return [
        replace(each, mask=mask_T.float())
        for each, mask_T in zip(with_columns(drawn, behaviour=apart), masks, strict=True)
    ]


def counted(sample: Sample) -> Tensor:
    """Return which of a sample's tokens count."""
    assert sample.mask is not None
    return sample.mask.bool()


@pytest.mark.parametrize("tokens", [4096, 60])
@pytest.mark.parametrize("entropy", [False, True], ids=["measured", "learned"])
def test_histograms_are_those_of_the_tensors_of_the_update(tokens: int, entropy: bool) -> None:
    samples = moved()
    engine = train_engine(lora_policies("a", "b"), limits=UpdateLimits(microbatch_tokens=tokens))
    found: dict[str, list[Tensor]] = {}
    for each, said_T2 in zip(samples, engine.examine(samples), strict=True):
        ratio_T = said_T2[:, 0] - each.columns[Column.BEHAVIOUR]
        found.setdefault(f"update_entropy/{each.learner}", []).append(said_T2[counted(each), 1])
        found.setdefault(f"update_log_ratio/{each.learner}", []).append(ratio_T[counted(each)])
    expected = {name: histogram(torch.cat(values).numpy()) for name, values in found.items()}
    engine.update(samples, Objective(SurrogateConfig().build(), entropy=entropy, parity=False))
    assert engine.distributions() == expected
    assert engine.distributions() == {}, "they were read"


def test_every_pass_over_a_token_counts_and_an_update_that_is_undone_does_not() -> None:
    samples, engine = moved(), train_engine(lora_policies("a", "b"))
    before = engine.state()
    engine.update(samples, Objective(SurrogateConfig().build(), epochs=2, minibatches=2, parity=False))
    tokens = sum(int(counted(each).sum()) for each in samples if each.learner == "a")
    found = engine.distributions()
    assert sum(found["update_entropy/a"].counts) == sum(found["update_log_ratio/a"].counts) == 2 * tokens
    engine.update(samples, Objective(SurrogateConfig().build(), parity=False))
    engine.load_state(before)
    assert engine.distributions() == {}


def summed(samples: list[Sample]) -> dict[str, Histogram]:
    """Return the histograms that all ranks together have of what is in the samples' columns."""

    def accumulate(own: Sequence[Sample]) -> UpdateSums:
        sums = UpdateSums()
        for each in own:
            logp_T = torch.zeros(len(each.targets))
            said = TokenStatistics(logp_T, each.columns["advantage"])
            targets = Targets(
                logp_T.long(), 1, torch.ones_like(logp_T), {"behaviour": each.columns["behaviour"]}
            )
            sums.add_statistics(each.learner, said, targets)
        sums.read()
        return sums

    return AmongRanks(ranks_here(60.0)).summed(samples, accumulate, {}).spread


@pytest.mark.ranks
def test_two_ranks_together_equal_one() -> None:
    samples = draw_samples(["a", "b"], [(4, 30), (5, 20), (3, 40), (2, 1)])
    scales = [10.0 ** (k - 4) for k in range(len(samples))]
    samples = with_columns(
        samples, behaviour=[s.columns["advantage"] * k for s, k in zip(samples, scales, strict=True)]
    )
    expected = {}
    for name in ("a", "b"):
        own = [each for each in samples if each.learner == name]
        for kind, column, sign in (("update_entropy", "advantage", 1), ("update_log_ratio", "behaviour", -1)):
            values = torch.cat([each.columns[column] for each in own]) * sign
            expected[f"{kind}/{name}"] = histogram(values.clamp(-20, 20).numpy())
    assert summed(samples) == expected
    assert run_ranks(2, summed, samples) == [expected, expected]
