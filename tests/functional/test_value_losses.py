"""Facts about critics' losses, by hand."""

import pytest
import torch
from torch import Tensor

from kapelle.functional import value_losses

F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


def value_gradient(loss: Tensor, value: Tensor) -> list[float]:
    (grad,) = torch.autograd.grad(loss.sum(), value)
    return [round(float(entry), 12) for entry in grad]


def test_squared_loss_has_the_error_as_gradient() -> None:
    value = tensor(3.0, -1.0).requires_grad_()
    loss = value_losses.squared_value_loss(value, tensor(1.0, 1.0))
    assert loss.tolist() == [2.0, 2.0]  # ½·2²
    assert value_gradient(loss, value) == [2.0, -2.0]


def test_huber_is_square_inside_and_linear_outside() -> None:
    # δ = 1: ½·0.5² = 0.125; 1·(3 − ½) = 2.5 with slope ±1.
    value = tensor(0.5, 3.0, -3.0).requires_grad_()
    loss = value_losses.huber_value_loss(value, torch.zeros(3, dtype=F64), delta=1.0)
    assert loss.tolist() == [0.125, 2.5, 2.5]
    assert value_gradient(loss, value) == [0.5, 1.0, -1.0]


def test_huber_with_delta_two_scales_the_linear_part() -> None:
    # 2·(5 − 1) = 8.
    assert value_losses.huber_value_loss(tensor(5.0), tensor(0.0), delta=2.0).item() == 8.0


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient", "clipped"),
    [
        # V_b = 1, clip 0.5, so V_clip lies in [0.5, 1.5].
        (3.0, 3.0, 1.125, 0.0, 1.0),  # moved to its target too fast: ½·max(0, 1.5²), no gradient
        (3.0, 0.0, 4.5, 3.0, 0.0),  # moved away from its target: ½·max(9, 1.5²), pulled back
        (1.2, 3.0, 1.62, -1.8, 0.0),  # inside: ½·1.8²
        (-1.0, -1.0, 1.125, 0.0, 1.0),  # below as above: V_clip = 0.5, ½·1.5²
        (-1.0, 3.0, 8.0, -4.0, 0.0),  # ½·max(16, 2.5²)
    ],
)
def test_clipped_loss_by_hand(
    value: float, target: float, loss: float, gradient: float, clipped: float
) -> None:
    v = tensor(value).requires_grad_()
    result = value_losses.clipped_value_loss(v, tensor(1.0), tensor(target), clip=0.5)
    assert result.loss.item() == pytest.approx(loss, abs=1e-12)
    assert value_gradient(result.loss, v) == pytest.approx([gradient], abs=1e-12)
    assert result.clipped.item() == clipped


def test_clipped_huber_by_hand() -> None:
    # V = 5, V_b = 1, clip 0.5: V_clip = 1.5. Target 6, δ = 1: free ½ = 0.5, bounded 4.5 − ½ = 4.
    value = tensor(5.0).requires_grad_()
    result = value_losses.clipped_huber_value_loss(value, tensor(1.0), tensor(6.0), clip=0.5, delta=1.0)
    assert result.loss.item() == 4.0
    assert result.clipped.item() == 1.0
    assert value_gradient(result.loss, value) == [0.0]


def test_targets_and_sampled_values_are_constants() -> None:
    value, behaviour, target = (tensor(x).requires_grad_() for x in (1.2, 1.0, 3.0))
    value_losses.clipped_value_loss(value, behaviour, target, clip=0.5).loss.backward()
    value_losses.huber_value_loss(value, target, delta=1.0).backward()
    assert value.grad is not None
    assert behaviour.grad is None
    assert target.grad is None


def test_explained_variance() -> None:
    target, mask = tensor(1.0, 2.0, 3.0, 99.0), torch.tensor([1, 1, 1, 0])
    assert value_losses.explained_variance(target, target, mask).item() == 1.0
    assert value_losses.explained_variance(tensor(7.0, 7.0, 7.0, 0.0), target, mask).item() == 0.0
    # Residuals 0, 1, 2 of values 1, 1, 1 against 1, 2, 3: no better than a constant; of −V: 2, 4, 6, variance 4.
    assert value_losses.explained_variance(-target, target, mask).item() == pytest.approx(1 - 4.0)
    assert value_losses.explained_variance(target, torch.ones(4), mask).item() == 0.0
