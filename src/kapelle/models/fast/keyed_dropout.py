"""Dropout (1207.0580) whose mask is a function of each token and not of the pass that computes it.

A generator draws masks in the order of a pass: another microbatch, or another process, then has other masks. Here a row has
a key, a layer has a salt, and whether a feature passes is a bit of their hash (the finaliser of MurmurHash3). So a step is the
same however its samples are split. Without keys, torch's generator draws.

Shapes: n rows, I features.
"""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

import torch
from torch import Tensor


def salt_of(path: str) -> int:
    """Return the salt of a layer, by its path in the model: an int32."""
    return crc32(path.encode()) - (1 << 31)


def dropped(x_nI: Tensor, share: float, keys_n: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows without about a `share` of their features, the others scaled up, and where they are let through."""
    if keys_n is None:
        return torch.native_dropout(x_nI, share, train=True)
    mask_nI = passes(keys_n, x_nI.shape[1], share)
    return x_nI * mask_nI / (1 - share), mask_nI


def passes(keys_n: Tensor, features: int, share: float) -> Tensor:
    """Return which features of rows with these keys (int32) are let through: all but about a `share`."""
    hash_nI = keys_n[:, None] ^ _columns(features, keys_n.device)
    _finalise(hash_nI)
    # The hash is signed: −2³¹ … 2³¹ − 1.
    return hash_nI >= int(share * (1 << 32)) - (1 << 31)


@lru_cache(maxsize=64)
def _columns(features: int, device: torch.device) -> Tensor:
    with torch.inference_mode(mode=False):
        column_I = torch.arange(features, dtype=torch.int32, device=device).mul_(-0x61C88647)
        _finalise(column_I)
        return column_I


def _finalise(hashes: Tensor) -> None:
    """Mix the bits of int32 numbers, in place."""
    for shift, factor in ((16, -0x7A143595), (13, -0x3D4D51CB), (16, 1)):
        # Torch shifts signs in; the finaliser shifts zeros in.
        hashes.bitwise_xor_((hashes >> shift).bitwise_and_((1 << (32 - shift)) - 1))
        hashes.mul_(factor)
