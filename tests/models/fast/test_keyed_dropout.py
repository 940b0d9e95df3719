"""Masks that are a function of a token's key, and look like chance."""

from __future__ import annotations

import pytest
import torch

from kapelle.models.fast.routed_linear import dropped, passed_features, salt_of

KEYS = torch.randint(-(1 << 31), 1 << 31, (400,), generator=torch.Generator().manual_seed(0)).to(torch.int32)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.9])
def test_every_row_and_column_drops_about_the_set_share(share: float) -> None:
    kept_nI = passed_features(KEYS, 300, share).double()
    assert float(kept_nI.mean()) == pytest.approx(1 - share, abs=5 * (share * (1 - share) / 120_000) ** 0.5)
    for each, count in ((kept_nI.mean(1), 300), (kept_nI.mean(0), 400)):
        spread = (share * (1 - share) / count) ** 0.5
        assert float((each - (1 - share)).abs().max()) < 5 * spread
        assert float(each.std()) == pytest.approx(spread, rel=0.2)


def test_rows_columns_and_layers_are_independent() -> None:
    masks = [
        passed_features(KEYS ^ salt_of(path), 300, 0.5).double() - 0.5
        for path in ("layers.0.q", "layers.0.k")
    ]
    here = masks[0]
    for other in (masks[1], here.roll(1, 0), here.roll(1, 1), here.roll((1, 1), (0, 1))):
        assert abs(float((4 * here * other).mean())) < 5 / 120_000**0.5


def test_one_row_does_not_depend_on_the_others() -> None:
    assert torch.equal(passed_features(KEYS, 64, 0.3)[7:9], passed_features(KEYS[7:9], 64, 0.3))


def test_kept_values_are_scaled_up() -> None:
    x_nI = torch.randn(400, 8)
    out_nI, mask_nI = dropped(x_nI, 0.25, KEYS)
    assert torch.equal(out_nI, x_nI * mask_nI / 0.75)
    assert 0 < int(mask_nI.sum()) < mask_nI.numel()


def test_without_keys_the_generator_draws() -> None:
    torch.manual_seed(3)
    one = dropped(torch.ones(4, 8), 0.5, None)[1]
    torch.manual_seed(3)
    assert torch.equal(one, torch.native_dropout(torch.ones(4, 8), 0.5, train=True)[1])
