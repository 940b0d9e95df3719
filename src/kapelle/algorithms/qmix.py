"""QMIX: credit from a monotonic mix of the agents' utilities, whose weights depend on the state (1803.11485).

    Q_tot = |W2|·ELU(|W1|·Q + b1) + V

Hypernetworks compute all weights from the state. `credit_mixer.py` describes how credit follows from Q_tot, `mixer_fit.py` what
the state is. Unlike a sum, this mix can express that an agent's good turn counts only together with another agent's.

Deviations from the paper:

- Utilities evaluate turns and do not choose them, so there is no maximum over actions.
- The targets are Monte Carlo returns by default.
- The hypernetworks of W1 and W2 have two layers, as in the authors' later code, and start constant in the state.
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
    """Size of the mixing network."""

    units: int = Field(default=32, ge=1)
    """Number of mixing units."""
    hidden: int = Field(default=64, ge=1)
    """Width of the hidden layer of the hypernetworks for W1 and W2."""


class QMIX(CreditMixer):
    """Settings of QMIX: value decomposition by a monotonic mix."""

    name: Literal["qmix"] = "qmix"
    mixing: MixingConfig = MixingConfig()

    def build(self) -> Algorithm:
        """Return the algorithm."""
        return mixer_row(self, self.name, self._mixer)

    def _mixer(self, width: int, agents: int) -> Module:
        from kapelle.algorithms.value_decomposition.mixer_fit import MonotonicMixer

        return MonotonicMixer(width, agents, self.mixing.units, self.mixing.hidden)
