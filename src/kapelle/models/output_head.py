"""The last linear map of a language model, as plain data: what a pass over a part of the vocabulary needs.

Shapes: K tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class OutputHead(NamedTuple):
    """Logits are `softcap · tanh(scale · (W h + b) / softcap)`, or `scale · (W h + b)` without a cap."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def finish(self, product_KV: Tensor) -> Tensor:
        """Return logits, in at least float32, from products `W h + b` of any words."""
        logits_KV = product_KV if product_KV.itemsize >= 4 else product_KV.float()
        if self.scale != 1.0:
            logits_KV = logits_KV * self.scale
        if self.softcap is not None:
            logits_KV = (logits_KV / self.softcap).tanh() * self.softcap
        return logits_KV

    def slope(self, logits_KV: Tensor) -> Tensor | None:
        """Return the derivative of `finish` without its `scale`, from logits; None where it is 1."""
        return None if self.softcap is None else 1 - (logits_KV / self.softcap).square()
