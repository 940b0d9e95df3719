"""Products of many rows: exact to rounding, whatever library makes them, and one that adds what it is given."""

from __future__ import annotations

import pytest
import torch

from kapelle.models.fast.routed_linear import product


@pytest.mark.parametrize("rows", [1, 7, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_product_is_exact_to_rounding(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(rows)
    x_NI, weight_OI, back_IO, more_NO = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((rows, 24), (40, 24), (24, 40), (rows, 40))
    )
    for weight in (weight_OI, back_IO.t()):  # as in the forward pass, and as in the backward pass
        exact_NO = x_NI.double() @ weight.double().t()
        bound = 200 * torch.finfo(dtype).eps
        assert float((product(x_NI, weight) - exact_NO).abs().max()) < bound
        assert float((product(x_NI, weight, more_NO.clone()) - exact_NO - more_NO).abs().max()) < bound


def test_there_may_be_no_rows() -> None:
    assert product(torch.empty(0, 4), torch.randn(3, 4), torch.empty(0, 3)).shape == (0, 3)
