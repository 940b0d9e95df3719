"""What the dropout of each token is drawn by: its learner's seed, and the tokens up to it.

A prefix that samples share is computed once in one split of a step and several times in another: as a function of the tokens
alone, its masks are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kapelle.engines.train.batch import Batch

_WORD = 0xFFFFFFFF


def token_keys(batch: Batch, seeds: Mapping[str, int]) -> Tensor:
    """Return the keys `_N` (int32) of a batch's flat tokens; `seeds` are by learner."""
    tokens, owners = batch.tokens_N.tolist(), iter(batch.owners)
    keys = [0] * len(tokens)
    learner, _, last = next(owners)
    for span in batch.spans:
        while span.start >= last:
            learner, _, last = next(owners)
        key = seeds.get(learner, 0) & _WORD
        if span.prefix is not None:
            begin, stem = span.prefix
            key = keys[begin + stem - 1]
        for place in range(span.start, span.start + span.length):
            key = (((key * 0x01000193) ^ (tokens[place] + 1)) * 0x85EBCA6B) & _WORD
            key ^= key >> 13
            keys[place] = key
    keys_N = torch.tensor(keys, dtype=torch.int64) - (1 << 31)
    return keys_N.to(batch.tokens_N.device, torch.int32)
