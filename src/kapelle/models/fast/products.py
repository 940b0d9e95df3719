"""Products of rows with a weight, by the fastest library on each device.

On a CPU in float32, torch multiplies by its BLAS, which for the thousands of rows of an update reaches 60 to 90 % of what oneDNN
reaches. All row counts go the same way: two libraries differ more than one does by the number of tokens in a pass. Half precision is
oneDNN's in torch already.

Shapes: N rows, I and O features in and out.
"""

from __future__ import annotations

import torch
from torch import Tensor


def product(x_NI: Tensor, weight_OI: Tensor, more_NO: Tensor | None = None) -> Tensor:
    """Return x·Wᵀ, plus `more_NO`, which may be used up."""
    if not _by_onednn(x_NI):
        return plain_product(x_NI, weight_OI, more_NO)
    made: Tensor
    if more_NO is None:
        made = torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, None, "none", [], "")  # noqa: SLF001 — it has no public name
    else:
        made = torch.ops.mkldnn._linear_pointwise.binary(x_NI, more_NO, weight_OI, None, "add")  # noqa: SLF001
    return made


def plain_product(x_NI: Tensor, weight_OI: Tensor, more_NO: Tensor | None = None) -> Tensor:
    """Return the same by torch's own product, to the bit what a linear layer of torch returns."""
    return torch.mm(x_NI, weight_OI.t()) if more_NO is None else more_NO.addmm_(x_NI, weight_OI.t())


def _by_onednn(x_NI: Tensor) -> bool:
    return x_NI.device.type == "cpu" and x_NI.dtype == torch.float32 and torch.backends.mkldnn.is_available()
