"""The train engine whose bases are shared out over the processes: each holds a part of the weights, their gradients and moments.

It is the engine `torch` on sharded bases. Between its calls every process holds all weights, for whoever samples; inside
`update`, `score` and `embed` only its part, and one block more at a time. Since FSDP gathers blocks where they are computed,
all processes take the same number of passes: one with fewer samples fills up with passes over a single token that count for
nothing. Nothing may break off between two of them, so that requests to stop and bad losses wait for the end of an update's step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import Batch, blank
from kapelle.engines.train.fsdp.sharded import ShardedBase
from kapelle.engines.train.protocol import Objective, Published, TrainSetup
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.engines.train.torch.learner import Learner
from kapelle.engines.train.torch.placement import laid_like
from kapelle.engines.train.torch.sharing import AmongRanks
from kapelle.errors import ConfigError
from kapelle.models.weights import copy_weights
from kapelle.rows import Sample


class FsdpTrainEngine:
    """Policies and critics on bases of which each rank holds a part."""

    def __init__(self, setup: TrainSetup, *, cpu_offload: bool = False) -> None:
        """Share the bases out; then add adapters and heads, which every rank holds whole."""
        _refuse(setup)
        models = {id(model): model for model in setup.models.values()}
        kind = next(iter(models.values())).device.type
        mesh = init_device_mesh(kind, (setup.ranks.size,))
        self._ranks = setup.ranks
        self._bases = [ShardedBase(model, mesh, cpu_offload=cpu_offload) for model in models.values()]
        self._own = TorchTrainEngine(setup, AmongRanks(setup.ranks, in_lockstep=True))
        self._own.take_passes(self._even)
        self._parted = {
            f"learners.{name}.{kind}.{key}": parameter
            for name, learner in self._own.learners.items()
            for kind in ("weights", "optimizer")
            for key, parameter in learner.parameters.items()
            if isinstance(parameter, DTensor)
        }
        for base in self._bases:
            base.gather()

    @contextmanager
    def _shared_out(self) -> Iterator[None]:
        for base in self._bases:
            base.share_out()
        try:
            yield
        finally:
            for base in self._bases:
                base.share_out()
                base.gather()

    def _even(self, passes: Mapping[str, Sequence[tuple[list[int], Batch]]]) -> list[tuple[list[int], Batch]]:
        """Return the passes over each base, by the name of one who stands on it; as many in every rank."""
        said = json.dumps({name: len(own) for name, own in passes.items()}).encode()
        counts = [json.loads(each) for each in self._ranks.together("passes", lambda: said)]
        evened: list[tuple[list[int], Batch]] = []
        for name, own in passes.items():
            missing = max(count[name] for count in counts) - len(own)
            device = self._own.model_of(name).device
            evened += [*own, *(([], blank(name, device)) for _ in range(missing))]
        return evened

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes behind the weights of each trained policy."""
        return self._own.versions

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learners by name: trained policies, then critics."""
        return self._own.learners

    def renderer(self, learner: str) -> WritingRenderer:
        """Return how text becomes the tokens of the model of a policy or critic."""
        return self._own.renderer(learner)

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return all weights of a policy, critic or reference, whole."""
        own = self._own.weights(name)
        if any(isinstance(tensor, DTensor) for tensor in own.values()):
            return self._own.model_of(name).base_parameters()
        return own

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference; ModelError when names or shapes do not fit."""
        parts = self._own.weights(name)
        if not any(isinstance(tensor, DTensor) for tensor in parts.values()):
            self._own.load_weights(name, weights)
            return
        whole = self.weights(name)
        copy_weights(whole, weights, f"'{name}'")
        given = {key: tensor.detach().clone() for key, tensor in weights.items()}  # they may be gathered ones
        with self._shared_out(), torch.no_grad():
            for key, part in parts.items():
                part.copy_(laid_like(given[key], part))
        self._own.learners[name].changed = True

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs or values `_T` (float32) of each sample's targets, without dropout."""
        with self._shared_out():
            return self._own.score(samples)

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy `_T2` (float32, nats) of each policy sample's targets, without dropout."""
        with self._shared_out():
            return self._own.examine(samples)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` (float32) over the tokens before each sample's targets."""
        with self._shared_out():
            return self._own.embed(samples)

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update; see the protocol."""
        with self._shared_out():
            return self._own.update(samples, objective)

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare samples' `behaviour` with the log-probs of the current weights; see the protocol."""
        with self._shared_out():
            return self._own.check_parity(samples, weights)

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call, whole."""
        changed = self._own.publish()
        return {name: Published(self.weights(name), each.version) for name, each in changed.items()}

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bit for bit."""
        with self._shared_out():
            self._own.exchange(one, other)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its trained policy as it is now."""
        self._own.refresh_references()

    def state(self) -> dict[str, Any]:
        """Return everything that an exact resume needs, whole; all ranks have to ask for it together."""
        return self._own.state()

    def parts(self) -> dict[str, object]:
        """Return everything that an exact resume needs, of what is shared out this rank's part; see `KeepsParts`."""
        return self._own.state(parts=True)

    def room(self, place: str, saved: Tensor) -> Tensor | None:
        """Return an empty tensor for what `parts` has at a dotted place; None if this rank keeps it whole."""
        own = self._parted.get(
            place, self._parted.get(place.rpartition(".")[0])
        )  # a moment is named under its weight
        return None if own is None or own.shape != saved.shape else torch.empty_like(own, dtype=saved.dtype)

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` or `parts` returned, bit for bit, whatever number of ranks returned it."""
        with self._shared_out():
            self._own.load_state(state)

    def close(self) -> None:
        """Do nothing: the engine holds nothing but memory."""


def _refuse(setup: TrainSetup) -> None:
    full = [p.name for p in setup.policies if p.trained and p.lora is None and p.endpoint is None]
    if full and (setup.references or setup.embedders):
        raise ConfigError(
            f"'{full[0]}' trains all weights of its model and needs a frozen copy of them (a reference or an embedder), which "
            "`train_engine: fsdp` does not shard. Train an adapter, or set `train_engine.name: ddp`."
        )
    if any(torch.float16 == model.dtype for model in setup.models.values()):
        raise ConfigError(
            "`train_engine: fsdp` does not scale losses for float16. Set `model.dtype: bfloat16`."
        )
