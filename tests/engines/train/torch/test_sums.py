"""What an update says of its policies' tokens, by hand."""

from __future__ import annotations

import pytest
import torch
from tests.support.tiny import draw_samples, lora_policies, train_engine, with_behaviour, with_columns

from kapelle.algorithm import Targets
from kapelle.algorithms.shared.surrogate import SurrogateConfig
from kapelle.engines.train.protocol import Objective
from kapelle.engines.train.torch.sharing import UpdateSums, means
from kapelle.functional.divergences import TokenStatistics


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


def test_every_update_says_them_whatever_its_coefficients() -> None:
    engine = train_engine(lora_policies("a"))
    drawn = with_behaviour(engine, draw_samples(["a"], [(4, 3), (5, 2)]))
    row = engine.update(drawn, Objective(SurrogateConfig().build()))
    assert row["entropy/a"] > 0.0
    assert row["effective_samples/a"] == pytest.approx(1.0, abs=1e-6)
    assert row["ratio_tail/a"] == 0.0


def test_they_do_not_depend_on_how_a_batch_is_split() -> None:
    rows = []
    for tokens in (4096, 8):
        from kapelle.engines.train.protocol import UpdateLimits

        engine = train_engine(lora_policies("a"), limits=UpdateLimits(microbatch_tokens=tokens))
        drawn = draw_samples(["a"], [(4, 3), (5, 2), (3, 4)])
        apart = [logp_T + 0.5 * k for k, logp_T in enumerate(engine.score(drawn))]
        objective = Objective(SurrogateConfig().build(), parity=False)
        rows.append(engine.update(with_columns(drawn, behaviour=apart), objective))
    assert 0.1 < rows[0]["effective_samples/a"] < 0.99
    for name in ("entropy/a", "ratio_tail/a", "effective_samples/a"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5)
