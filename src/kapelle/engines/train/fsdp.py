"""The train engine whose bases are shared out over the processes: each holds a part of the weights, their gradients and moments.

It is the engine `torch` on sharded bases. Between its calls every process holds all weights, for whoever samples; inside
`update`, `score` and `embed` only its part, and one block more at a time. Since FSDP gathers blocks where they are computed,
all processes take the same number of passes: one with fewer samples fills up with passes over a single token that count for
nothing. Nothing may break off between two of them, so that requests to stop and bad losses wait for the end of an update's step.

Shapes: N flat tokens, D hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import Batch, blank
from kapelle.engines.train.protocol import Examines, KeepsParts, Objective, Published, TrainEngine, TrainSetup
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.engines.train.torch.learner import Learner, distributed_like
from kapelle.errors import ConfigError
from kapelle.models.fast.flat import Attend
from kapelle.models.language_model import LanguageModel
from kapelle.models.weights import copy_weights
from kapelle.rows import Sample


class FsdpTrainEngine(TrainEngine, KeepsParts, Examines):
    """Policies and critics on bases of which each rank holds a part."""

    def __init__(self, setup: TrainSetup, *, cpu_offload: bool = False) -> None:
        """Share the bases out; then add adapters and heads, which every rank holds whole."""
        full = [p.name for p in setup.policies if p.trained and p.lora is None and p.endpoint is None]
        if full and (setup.references or setup.embedders):
            raise ConfigError(
                f"'{full[0]}' trains all weights of its model and needs a frozen copy of them (a reference or an embedder), which "
                "`train_engine: fsdp` does not shard. Train an adapter, or set `train_engine.name: ddp`."
            )
        whole = [critic.name for critic in setup.critics if critic.whole]
        if whole:
            raise ConfigError(
                f"'{whole[0]}' trains all weights of its model (`team.critic_train: full`), which `train_engine: fsdp` does not shard. Set "
                "`team.critic_train: lora` or `head`, or `train_engine.name: ddp`."
            )
        if any(torch.float16 == model.dtype for model in setup.models.values()):
            raise ConfigError(
                "`train_engine: fsdp` does not scale losses for float16. Set `model.dtype: bfloat16`."
            )
        models = {id(model): model for model in setup.models.values()}
        kind = next(iter(models.values())).device.type
        mesh = init_device_mesh(kind, (setup.ranks.size,))
        self._ranks = setup.ranks
        self._bases = [ShardedBase(model, mesh, cpu_offload=cpu_offload) for model in models.values()]
        self._engine = TorchTrainEngine(setup, in_lockstep=True, equalise=self._equalise)
        self._sharded_parameters = {
            f"learners.{name}.{kind}.{key}": parameter
            for name, learner in self._engine.learners.items()
            for kind in ("weights", "optimizer")
            for key, parameter in learner.parameters.items()
            if isinstance(parameter, DTensor)
        }
        for base in self._bases:
            base.gather()

    @contextmanager
    def _sharded(self) -> Iterator[None]:
        for base in self._bases:
            base.shard()
        try:
            yield
        finally:
            for base in self._bases:
                base.shard()
                base.gather()

    def _equalise(
        self, passes: Mapping[str, Sequence[tuple[list[int], Batch]]]
    ) -> list[tuple[list[int], Batch]]:
        """Return the passes over each base, by the name of a learner on it; the same number in every rank."""
        own_counts = json.dumps({name: len(own) for name, own in passes.items()}).encode()
        counts = [json.loads(each) for each in self._ranks.all_gather("passes", lambda: own_counts)]
        equalised: list[tuple[list[int], Batch]] = []
        for name, own in passes.items():
            missing = max(count[name] for count in counts) - len(own)
            device = self._engine.model_of(name).device
            equalised += [*own, *(([], blank(name, device)) for _ in range(missing))]
        return equalised

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes behind the weights of each trained policy."""
        return self._engine.versions

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learners by name: trained policies, then critics."""
        return self._engine.learners

    def renderer(self, learner: str) -> WritingRenderer:
        """Return how text becomes the tokens of the model of a policy or critic."""
        return self._engine.renderer(learner)

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return all weights of a policy, critic or reference, whole."""
        own = self._engine.weights(name)
        if any(isinstance(tensor, DTensor) for tensor in own.values()):
            return self._engine.model_of(name).base_parameters()
        return own

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference; ModelError when names or shapes do not fit."""
        parts = self._engine.weights(name)
        if not any(isinstance(tensor, DTensor) for tensor in parts.values()):
            self._engine.load_weights(name, weights)
            return
        whole = self.weights(name)
        copy_weights(whole, weights, f"'{name}'")
        given = {key: tensor.detach().clone() for key, tensor in weights.items()}  # they may be gathered ones
        with self._sharded(), torch.no_grad():
            for key, part in parts.items():
                part.copy_(distributed_like(given[key], part))
        self._engine.learners[name].changed = True

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs or values `_T` (float32) of each sample's targets, without dropout."""
        with self._sharded():
            return self._engine.score(samples)

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy `_T2` (float32, nats) of each policy sample's targets, without dropout."""
        with self._sharded():
            return self._engine.examine(samples)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` (float32) over the tokens before each sample's targets."""
        with self._sharded():
            return self._engine.embed(samples)

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update; see the protocol."""
        with self._sharded():
            return self._engine.update(samples, objective)

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare samples' `behaviour` with the log-probs of the current weights; see the protocol."""
        with self._sharded():
            return self._engine.check_parity(samples, weights)

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call, whole."""
        changed = self._engine.publish()
        return {name: Published(self.weights(name), each.version) for name, each in changed.items()}

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bit for bit."""
        with self._sharded():
            self._engine.exchange(one, other)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its trained policy as it is now."""
        self._engine.refresh_references()

    def state(self) -> dict[str, Any]:
        """Return everything that an exact resume needs, whole; all ranks have to ask for it together."""
        return self._engine.state()

    def parts(self) -> dict[str, object]:
        """Return everything that an exact resume needs, of what is shared out this rank's part; see `KeepsParts`."""
        return self._engine.state(parts=True)

    def room(self, place: str, saved: Tensor) -> Tensor | None:
        """Return an empty tensor for what `parts` has at a dotted place; None if this rank keeps it whole."""
        own = self._sharded_parameters.get(
            place, self._sharded_parameters.get(place.rpartition(".")[0])
        )  # a moment is named under its weight
        return None if own is None or own.shape != saved.shape else torch.empty_like(own, dtype=saved.dtype)

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore what `state` or `parts` returned, bit for bit, whatever number of ranks returned it."""
        with self._sharded():
            self._engine.load_state(state)


class ShardedBase:
    """The weights of one model under FSDP2 (`fully_shard`): whole in this process, or its part of them.

    FSDP gathers a block's weights before the block and gives them back after it, forward and backward, by hooks around
    methods that it is told of. The flat pass calls no module's `forward`, so that each block, and the whole pass, becomes
    such a method.
    """

    def __init__(self, model: LanguageModel, mesh: DeviceMesh, *, cpu_offload: bool) -> None:
        """Share the weights out over the mesh; they are parts from now on."""
        if model.flat is None:
            raise ConfigError(
                f"`train_engine: fsdp` shards models of the flat pass, and '{model.name}' is of another kind. Set "
                "`train_engine.name: ddp`."
            )
        self._model, self._flat = model, model.flat
        model.sharded = True
        offload: OffloadPolicy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
        for layer in self._flat.layers:
            fully_shard(layer, mesh=mesh, offload_policy=offload)
            layer.flat_block = MethodType(_block, layer)
            register_fsdp_forward_method(layer, "flat_block")
        root: Any = model.model
        fully_shard(root, mesh=mesh, offload_policy=offload)
        root.flat_pass = MethodType(self._pass, root)
        register_fsdp_forward_method(root, "flat_pass")
        self._parts = [module for module in root.modules() if isinstance(module, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # sums: the engine divides by the global weight
            part.set_force_sum_reduction_for_comms(True)

    def shard(self) -> None:
        """Keep this process's part of the weights alone, and compute with gathered ones."""
        for part in self._parts:
            part.reshard()
        self._model.sharded_pass = self._model.model.flat_pass

    def gather(self) -> None:
        """Hold all weights, so that they can be read and sampled with."""
        self._model.sharded_pass = None
        for part in self._parts:
            part.unshard()

    def _pass(self, _root: Any, tokens_N: Tensor, positions_N: Tensor, attend: Attend, run: Any) -> Tensor:
        layers = self._flat.layers

        def block(own: Any, number: int, x_ND: Tensor, *rest: Any) -> Tensor:
            if number == 0 and torch.is_grad_enabled() and not x_ND.requires_grad:
                # Every process's backward pass goes through every block, whichever adapters its rows have.
                x_ND = x_ND.detach().requires_grad_()
            after_ND: Tensor = layers[number].flat_block(own, run, number, x_ND, *rest)
            return after_ND

        return self._flat.hidden(tokens_N, positions_N, attend, block)


def _block(_layer: Any, own: Any, run: Any, *args: Any) -> Any:
    """Run a block, or let `run` keep its input alone and compute it again."""
    return own(*args) if run is None else run(own, *args)
