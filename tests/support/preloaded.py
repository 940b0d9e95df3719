"""Everything that a run imports, imported: forks of a process that has read this start at once."""

from __future__ import annotations

import tests.support.plugins
import torch
from tests.support.tiny import tiny_model

import kapelle.algorithms.grpo
import kapelle.algorithms.mappo
import kapelle.engines.rollout.local.decode_strategies
import kapelle.engines.rollout.local.engine
import kapelle.training.trainer
import kapelle.workflows.debate

__all__ = ["kapelle", "tests"]

torch.set_num_threads(1)  # a pool of threads does not survive a fork
tiny_model()
