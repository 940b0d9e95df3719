"""The last linear map of a language model, as plain data: what a pass over a part of the vocabulary needs.

Between that map and the logits stands a factor or a soft cap: Granite divides its logits by a number, Cohere and Falcon-H1
multiply them by one, Gemma 2 caps them. The number is in the model's settings, but under one name (`logits_scaling`) some
models divide and others multiply. So every reading of the settings is a candidate, and the model's own logits decide.

Shapes: K tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")
"""Settings of `transformers` that multiply or divide the logits."""
CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Settings that cap them."""


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


def scale_and_cap(
    settings: Mapping[str, Any], product_KV: Tensor, logits_KV: Tensor, bound: float
) -> tuple[float, float | None] | None:
    """Return the factor and the cap by which a model's settings make its logits of the head's products.

    None where no reading of the settings does; `bound` is the greatest difference, as a share of the logits' norm.
    """
    expected_KV = logits_KV.float()
    for scale, cap in _readings(settings):
        found_KV = OutputHead(product_KV, scale=scale, softcap=cap).finish(product_KV).float()
        if (found_KV - expected_KV).norm() <= bound * expected_KV.norm():
            return scale, cap
    return None


def _readings(settings: Mapping[str, Any]) -> Iterator[tuple[float, float | None]]:
    """Yield what settings may mean, the plainest last: a factor that is set is a factor that is used."""
    scales = [float(settings[key]) for key in SCALES if isinstance(settings.get(key), float | int)]
    caps = [float(settings[key]) for key in CAPS if settings.get(key)]
    for cap in (*caps, None):
        for scale in (*scales, *(1 / scale for scale in scales if scale), 1.0):
            yield scale, cap
