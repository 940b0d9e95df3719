"""QMIX: credit from a monotonic mixing network over the agents' utilities, whose weights depend on the state (arXiv:1803.11485).

    Q_tot = |W2|·ELU(|W1|·Q + b1) + V

Hypernetworks compute all weights from the state. The module `credit_mixer.py` describes how credit follows from Q_tot, and
`mixer_fit.py` describes the state. Unlike a sum, a monotonic mixing network can express that a good turn of one agent counts
only together with a good turn of another agent.

Deviations from the paper:

- Utilities only evaluate turns and do not select actions, so there is no maximum over actions.
- The targets are Monte Carlo returns by default.
- The hypernetworks of W1 and W2 have two layers, as in the authors' later code. Initially, their outputs are independent of
  the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kapelle.algorithm import Algorithm
from kapelle.algorithms.value_decomposition import mixer_row
from kapelle.algorithms.value_decomposition.settings import CreditMixer
from kapelle.settings.base import Settings

if TYPE_CHECKING:
    from torch.nn import Module


class MixingConfig(Settings):
    """The size of the mixing network."""

    units: int = Field(default=32, ge=1)
    """The number of mixing units."""
    hidden: int = Field(default=64, ge=1)
    """The width of the hidden layer in the hypernetworks of W1 and W2."""


class QMIX(CreditMixer):
    """Settings of QMIX: value decomposition by a monotonic mixing network."""

    name: Literal["qmix"] = "qmix"
    mixing: MixingConfig = MixingConfig()

    def build(self) -> Algorithm:
        """Return the algorithm that these settings describe."""
        return mixer_row(self, self.name, self._mixer)

    def _mixer(self, width: int, agents: int) -> Module:
        from kapelle.algorithms.value_decomposition.mixer_fit import MonotonicMixer

        return MonotonicMixer(width, agents, self.mixing.units, self.mixing.hidden)
