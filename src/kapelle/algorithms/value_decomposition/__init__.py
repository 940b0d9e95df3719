"""Learned decompositions of a team's return: the common part of VDN and QMIX."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kapelle.algorithm import Algorithm, CreditMemory
from kapelle.algorithms.signals.embeddings import SENTENCES, Embeddings
from kapelle.algorithms.value_decomposition.settings import CreditMixer
from kapelle.errors import AbsentPackage
from kapelle.models import devices
from kapelle.runtime.randomness import derive_seed
from kapelle.team import Team

if TYPE_CHECKING:
    from torch import nn


def mixer_row(settings: CreditMixer, name: str, mixer: Callable[[int, int], nn.Module]) -> Algorithm:
    """Return the algorithm.

    The function `mixer` builds the mixing network from the width of embeddings (D) and the number of agents (A).
    """

    def memory(team: Team, seed: int) -> CreditMemory:
        from kapelle.algorithms.value_decomposition.credit_mixer import MixedCredit

        return MixedCredit(settings, mixer, team, derive_seed(seed, "mixer"))

    check = partial(check_libraries, settings=settings)
    reader = Embeddings(settings.embedder, settings.embedder_device)
    row = settings.row(name, None, (check,), memory=memory, needs=(reader,))
    return replace(row, memory_learns=True)


def check_libraries(team: Team, settings: CreditMixer) -> None:
    """Raise ConfigError if the library of the embedding model is not installed or a device does not exist."""
    if settings.embedder.startswith(SENTENCES) and find_spec("sentence_transformers") is None:
        raise AbsentPackage(
            f"`algorithm.embedder: {settings.embedder}` needs the package sentence-transformers. Run "
            "`pip install 'kapelle[embed]'`, or set `algorithm.embedder` to `base` or a model's path."
        )
    devices.check_device(settings.fit.device, "algorithm.fit.device")
    if settings.embedder_device is not None:
        devices.check_device(settings.embedder_device, "algorithm.embedder_device")
