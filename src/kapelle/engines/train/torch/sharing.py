"""How processes that hold the same learners share the work of one optimiser step.

Every process takes a part of the step's samples; losses, weights and gradients are summed over all processes before they
are divided. The step is then the one that a single process takes, however the samples are split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kapelle.engines.train.sums import UpdateSums
from kapelle.engines.train.torch.learner import Learner
from kapelle.rows import Sample


class Sharing(Protocol):
    """One of the processes that share a step."""

    def share(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return this process's part of a step's samples, bundles whole; possibly empty."""
        ...

    def join(self, sums: UpdateSums, learners: Mapping[str, Learner]) -> None:
        """Sum `sums` and the learners' gradients over all processes."""
        ...

    def give_up(self) -> None:
        """Tell the other processes, which wait in `join`, that this one failed before it."""
        ...


class Alone:
    """A single process that does all the work."""

    def share(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return all samples."""
        return samples

    def join(self, sums: UpdateSums, learners: Mapping[str, Learner]) -> None:
        """Do nothing: the sums are complete."""

    def give_up(self) -> None:
        """Do nothing: no process waits."""
