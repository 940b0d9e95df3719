"""QMIX: the team's value rises with every agent's utility, in a way that depends on the state (1803.11485).

Q_tot = |W2|·ELU(|W1|·Q + b1) + V, all weights computed from the state by hypernetworks; `credit_mixer.py` describes how credit
follows from it, `mixer_fit.py` what the state is. Unlike a sum it can express that an agent's good turn counts only
together with another's.

Deviations from the paper: policies act and utilities only judge turns, so there is no maximum over actions; Monte Carlo
returns by default; two layers in the hypernetworks of W1 and W2, as in the authors' later code, which start as
constants of the state.
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
    """Mixing units."""
    hidden: int = Field(default=64, ge=1)
    """Width of the hidden layer of the hypernetworks that make W1 and W2."""


class QMIX(CreditMixer):
    """Settings of value decomposition by a monotonic mix."""

    name: Literal["qmix"] = "qmix"
    mixing: MixingConfig = MixingConfig()

    def build(self) -> Algorithm:
        """Return the algorithm's row."""
        return mixer_row(self, self.name, self._mixer)

    def _mixer(self, width: int, agents: int) -> Module:
        from kapelle.algorithms.value_decomposition.mixer_fit import MonotonicMixer

        return MonotonicMixer(width, agents, self.mixing.units, self.mixing.hidden)
