"""Samples that a loss compares with one another stay together: in one forward pass, and in one optimiser step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from kapelle.rows import Sample
from kapelle.runtime.interrupts import stop_if_asked

T = TypeVar("T")


def bundles_of(chosen: Sequence[int], samples: Sequence[Sample]) -> list[list[int]]:
    """Return the indices in `chosen` grouped by `Sample.bundle`, in order; a sample without a bundle is alone."""
    found: dict[tuple[str, int | None, int], list[int]] = {}
    for k in chosen:
        sample = samples[k]
        alone = k if sample.bundle is None else -1
        found.setdefault((sample.learner, sample.bundle, alone), []).append(k)
    return list(found.values())


def passes(chosen: Sequence[int], samples: Sequence[Sample], max_tokens: int) -> list[tuple[list[int], int]]:
    """Return what each forward pass may hold, with its most tokens; no bundle is split.

    Without bundles that is everything, and `pack` splits it. A bundle longer than `max_tokens` has a pass of its own.
    """
    if all(samples[k].bundle is None for k in chosen):
        return [(list(chosen), max_tokens)]
    pieces: list[tuple[list[int], int]] = []
    for bundle in bundles_of(chosen, samples):
        size = sum(len(samples[k].tokens) for k in bundle)
        if pieces and pieces[-1][1] + size <= max_tokens:
            pieces[-1] = (pieces[-1][0] + bundle, pieces[-1][1] + size)
        else:
            pieces.append((bundle, size))
    return pieces


def minibatches(samples: Sequence[Sample], parts: int, seed_of: Callable[[str], int]) -> list[list[int]]:
    """Split every learner's samples at random into `parts`, bundles whole; the split of one learner does not depend on the others.

    `seed_of` gives a learner's seed. Parts that come out empty are left out.
    """
    split: list[list[int]] = [[] for _ in range(parts)]
    for learner in dict.fromkeys(sample.learner for sample in samples):
        own = bundles_of([k for k, sample in enumerate(samples) if sample.learner == learner], samples)
        if parts > 1:
            generator = torch.Generator().manual_seed(seed_of(learner))
            own = [own[k] for k in torch.randperm(len(own), generator=generator).tolist()]
        for number in range(parts):
            split[number].extend(sorted(k for bundle in own[number::parts] for k in bundle))
    return [chosen for chosen in split if chosen]


def breakable(passes: Sequence[T]) -> Iterator[T]:
    """Yield passes one after another; raise StopRequested before one if the run should stop."""
    for each in passes:
        stop_if_asked()
        yield each
