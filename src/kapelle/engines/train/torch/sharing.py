"""How the work of one optimiser step is shared among processes that hold the same learners.

Every process takes a share of the step's samples, and sums of losses, of their weights and of gradients are added up before
they are divided: the step is then the one that a process alone takes, however the samples are shared out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kapelle.engines.train.sums import UpdateSums
from kapelle.engines.train.torch.learner import Learner
from kapelle.rows import Sample


class Sharing(Protocol):
    """One process among those that share a step."""

    def share(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return what this process computes of a step's samples, bundles whole; possibly nothing."""
        ...

    def join(self, sums: UpdateSums, learners: Mapping[str, Learner]) -> None:
        """Make `sums` and the learners' gradients those of all processes."""
        ...

    def give_up(self) -> None:
        """Tell the others, which wait in `join`, that this process has broken off before it."""
        ...


class Alone:
    """A process that does all of it."""

    def share(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return all samples."""
        return samples

    def join(self, sums: UpdateSums, learners: Mapping[str, Learner]) -> None:
        """Have everything already."""

    def give_up(self) -> None:
        """Have nobody to tell."""
