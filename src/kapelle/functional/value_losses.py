"""Losses of critics: squared, clipped and Huber losses, computed elementwise for tensors of any shape.

All losses have the factor ½, so that their gradient near the target is the plain error V − R. Targets and values at sampling
are constants without gradient.
"""

from __future__ import annotations

from typing import NamedTuple

from kapelle.functional.masking import as_float, masked_var
from kapelle.runtime.on_demand import Tensor, torch


class ValueLoss(NamedTuple):
    """A loss to minimise, and a mask of the same shape that is 1.0 where clipping has removed the gradient and 0.0 elsewhere."""

    loss: Tensor
    clipped: Tensor


def squared_value_loss(value: Tensor, target: Tensor) -> Tensor:
    """Return half the squared error, ½(V − R)², elementwise."""
    return 0.5 * (as_float(value) - as_float(target).detach()).square()


def huber_value_loss(value: Tensor, target: Tensor, *, delta: float) -> Tensor:
    """Return the Huber loss, elementwise: ½e² for errors |e| ≤ delta, and delta·(|e| − ½delta) for larger errors."""
    return torch.nn.functional.huber_loss(
        as_float(value), as_float(target).detach(), reduction="none", delta=delta
    )


def clipped_value_loss(value: Tensor, value_behaviour: Tensor, target: Tensor, *, clip: float) -> ValueLoss:
    """Return ½·max((V − R)², (V_clip − R)²) with V_clip = V_b + clamp(V − V_b, ±clip), elementwise.

    Taking the maximum is the pessimistic form of PPO's value clipping, as in MAPPO (arXiv:2103.01955).
    """
    free = squared_value_loss(value, target)
    bounded = squared_value_loss(_clip_around(value, value_behaviour, clip), target)
    return _pessimistic(free, bounded)


def clipped_huber_value_loss(
    value: Tensor, value_behaviour: Tensor, target: Tensor, *, clip: float, delta: float
) -> ValueLoss:
    """Return the clipped value loss of `clipped_value_loss` with Huber losses in place of squared errors, elementwise."""
    free = huber_value_loss(value, target, delta=delta)
    bounded = huber_value_loss(_clip_around(value, value_behaviour, clip), target, delta=delta)
    return _pessimistic(free, bounded)


def explained_variance(value: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    """Return the explained variance 1 − Var(R − V)/Var(R) over unmasked entries as a scalar.

    A value of 1 is perfect, and a value of 0 is no better than a constant prediction. If the targets do not vary, the result
    is 0 by convention.
    """
    spread = masked_var(target, mask)
    unexplained = masked_var(as_float(target) - as_float(value), mask)
    return torch.where(spread > 0, 1.0 - unexplained / spread.clamp(min=torch.finfo(spread.dtype).tiny), 0.0)


def _clip_around(value: Tensor, value_behaviour: Tensor, clip: float) -> Tensor:
    anchor = as_float(value_behaviour).detach()
    return anchor + (as_float(value) - anchor).clamp(-clip, clip)


def _pessimistic(free: Tensor, bounded: Tensor) -> ValueLoss:
    # At equal losses the clip is inactive (or symmetric about the target): the unclipped branch carries the gradient.
    # torch.maximum would give each branch half of it.
    chosen = bounded > free
    return ValueLoss(torch.where(chosen, bounded, free), chosen.to(free.dtype))
