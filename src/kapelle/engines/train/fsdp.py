"""The train engine with sharded base models, in which each process holds a shard of the weights, gradients and moments.

This engine runs the engine `torch` on sharded base models. Between calls of the engine, every process holds all
weights, because the sampler needs them. Inside `update`, `score` and `embed`, a process holds only its shard, plus the
weights of one block at a time. FSDP gathers each block for its computation, so all processes must take the same number
of passes. A process with fewer samples adds passes over a single token that have no effect. No process may stop between
two passes, so stop requests and losses that are not finite take effect after the optimiser step of an update.

In tensor shapes, N is the number of flat tokens and D the hidden size.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import Batch, blank
from kapelle.engines.train.protocol import (
    CountsTokens,
    Examines,
    KeepsParts,
    Objective,
    Published,
    TrainEngine,
    TrainSetup,
)
from kapelle.engines.train.sharding import Sharding
from kapelle.engines.train.tensor_parallel import beside_split, split_layers, weights_of_own_heads
from kapelle.engines.train.torch.engine import TorchTrainEngine
from kapelle.engines.train.torch.learner import Learner, distributed_like, gathered, local_part
from kapelle.errors import ModelError
from kapelle.functional.distributions import Histogram
from kapelle.models.fast.attention import AttentionPlan, plan_sequences
from kapelle.models.language_model import DTYPES, LanguageModel, blocks_of, copy_language_model, whole_pass
from kapelle.models.lora_bank import copy_weights
from kapelle.rows import Sample
from kapelle.team import reference_name


class FsdpTrainEngine(TrainEngine, KeepsParts, Examines, CountsTokens):
    """A train engine for policies and critics on base models of which each rank holds a shard."""

    def __init__(self, setup: TrainSetup, settings: Sharding | None = None) -> None:
        """Shard the base models and their frozen copies, and then add adapters and heads, which every rank holds in full."""
        settings = settings or Sharding()
        split = settings.tensor_parallel
        if split > 1:  # torch's warning about flattening meshes is for code that redistributes in every pass
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        kind = next(iter(setup.models.values())).device.type
        mesh = init_device_mesh(kind, (setup.ranks.size // split, split), mesh_dim_names=("data", "tensor"))
        self._ranks = setup.ranks
        self._bases: list[ShardedBase] = []
        self._sampled: dict[str, LanguageModel] = {}
        if split > 1:
            # Layers that are split over several processes wait for each other, but samplers are independent, so they need a
            # separate model.
            self._sampled = dict(setup.models)
            setup = replace(
                setup,
                models={base: copy_language_model(each, each.name) for base, each in setup.models.items()},
            )
        models = {id(model): model for model in setup.models.values()}
        spoken = {id(setup.models[policy.base]) for policy in setup.policies if policy.endpoint is None}

        def share_out(copies: Sequence[LanguageModel]) -> None:
            for model in (*models.values(), *copies):
                sampled = id(model) in spoken
                if split > 1:
                    split_layers(model, mesh["tensor"], setup.ranks.size // split)
                own = ShardedBase(
                    model, mesh["data"], settings, sampled=sampled and split == 1, headed=sampled
                )
                self._bases.append(own)

        self._engine = TorchTrainEngine(
            setup,
            in_lockstep=True,
            equalise=self._equalise,
            share_out=share_out,
            together=split,
            complete=self._complete,
        )
        self._summed_apart = [
            parameter
            for model in (models.values() if split > 1 else ())
            for parameter in weights_of_own_heads(model)
        ]
        self._tensor_group = mesh["tensor"].get_group() if split > 1 else None
        self._bases_of = {p.name: p.base for p in setup.policies if p.endpoint is None}
        for base in self._bases:
            base.gather()
        kept: dict[str, Tensor] = {
            f"learners.{name}.{kind}.{key}": parameter
            for name, learner in self._engine.learners.items()
            for kind in ("weights", "optimizer")
            for key, parameter in learner.parameters.items()
        }
        for name in map(reference_name, self._engine.versions if setup.references else ()):
            kept |= {f"references.{name}.{key}": tensor for key, tensor in self._engine.weights(name).items()}
        self._sharded_tensors = {place: each for place, each in kept.items() if isinstance(each, DTensor)}

    def _complete(self) -> None:
        """Sum the gradients of weights that every process applies only to its own attention heads."""
        for parameter in self._summed_apart:
            if parameter.grad is not None:
                all_reduce(local_part(parameter.grad), group=self._tensor_group)

    def _show_sampler(self) -> None:
        """Copy the learned weights into the models of the sampler."""
        with torch.no_grad():
            for name in self._engine.versions:
                whole = self._sampled[self._bases_of[name]].base_parameters()
                for key, part in self._engine.weights(name).items():
                    whole[key].copy_(gathered(part.detach()))

    @contextmanager
    def _sharded(self, *, changes: bool = False) -> Iterator[None]:
        for base in self._bases:
            base.shard()
        try:
            yield
        finally:
            for base in self._bases:
                base.shard()
                base.gather()
        if changes and self._sampled:
            self._show_sampler()

    def _equalise(
        self, passes: Mapping[str, Sequence[tuple[list[int], Batch]]]
    ) -> list[tuple[list[int], Batch]]:
        """Return the passes over each base model such that every rank takes the same number of passes and of steps.

        The mapping `passes` has the name of one learner per base model as its key. A pass of the flat implementation
        counts as one step. A pass of `transformers` counts as one step for each bucket of sequences.
        """
        flat = {name: self._engine.model_of(name).flat is not None for name in passes}
        steps = {
            name: [1 if flat[name] else len(batch.plan.buckets) for _, batch in own]
            for name, own in passes.items()
        }
        encoded = json.dumps(steps).encode()
        everywhere = [json.loads(each) for each in self._ranks.all_gather("passes", lambda: encoded)]
        equalised: list[tuple[list[int], Batch]] = []
        for name, own in passes.items():
            device = self._engine.model_of(name).device
            most = [max(each) for each in zip_longest(*(each[name] for each in everywhere), fillvalue=1)]
            for number, needed in enumerate(most):
                members, batch = own[number] if number < len(own) else ([], blank(name, device))
                idle = needed - (steps[name][number] if number < len(own) else 1)
                if idle:
                    plan = AttentionPlan(batch.spans, device, idle_buckets=idle)
                    batch = replace(batch, plan=plan)
                equalised.append((members, batch))
        return equalised

    @property
    def versions(self) -> Mapping[str, int]:
        """Mapping from each trained policy to the number of changes of its weights."""
        return self._engine.versions

    @property
    def learners(self) -> Mapping[str, Learner]:
        """The learners by name: first the trained policies, then the critics."""
        return self._engine.learners

    def renderer(self, learner: str) -> WritingRenderer:
        """Return the renderer of the model of a policy or critic."""
        return self._engine.renderer(learner)

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return all weights of a policy, critic or reference policy, unsharded.

        If the model has no sampler (such as the model of a reference policy or a critic's own model), all ranks must
        call this method together.
        """
        own = self._engine.weights(name)
        if name in self._engine.versions and any(isinstance(tensor, DTensor) for tensor in own.values()):
            model = self._engine.model_of(name)
            return self._sampled.get(self._bases_of[name], model).base_parameters()
        return {key: gathered(tensor) for key, tensor in own.items()}

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference policy. Raises ModelError if names or shapes do not match."""
        parts = self._engine.weights(name)
        if not any(isinstance(tensor, DTensor) for tensor in parts.values()):
            self._engine.load_weights(name, weights)
            return
        copy_weights(self.weights(name), weights, f"'{name}'")
        given = {
            key: tensor.detach().clone() for key, tensor in weights.items()
        }  # the values may be gathered weights
        with self._sharded(changes=True), torch.no_grad():
            for key, part in parts.items():
                part.copy_(distributed_like(given[key], part))
        if name in self._engine.learners:
            self._engine.learners[name].replaced()

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probs or values of each sample's targets as float32, of shape (T,), computed without dropout."""
        with self._sharded():
            return self._engine.score(samples)

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy (in nats) of each target token of policy samples, as float32 of shape (T, 2), without dropout."""
        with self._sharded():
            return self._engine.examine(samples)

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state over the tokens before each sample's targets, as float32 of shape (D,)."""
        with self._sharded():
            return self._engine.embed(samples)

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update (see `TrainEngine.update`)."""
        with self._sharded(changes=True):
            return self._engine.update(samples, objective)

    def distributions(self) -> Mapping[str, Histogram]:
        """Return histograms of the policies' tokens in the updates since the last call (see `CountsTokens.distributions`)."""
        return self._engine.distributions()

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare the `behaviour` column of samples with the log-probs of the current weights (see `TrainEngine.check_parity`)."""
        with self._sharded():
            return self._engine.check_parity(samples, weights)

    def publish(self) -> Mapping[str, Published]:
        """Return the unsharded weights of the policies that changed since the last call."""
        changed = self._engine.publish()
        return {name: Published(self.weights(name), each.version) for name, each in changed.items()}

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies exactly, including weights, optimiser state and reference policies."""
        with self._sharded(changes=True):
            self._engine.exchange(one, other)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its current trained policy."""
        with self._sharded():
            self._engine.refresh_references()

    def state(self) -> dict[str, Any]:
        """Return the unsharded state for an exact resume. All ranks must call this method together."""
        return self._engine.state()

    def parts(self) -> dict[str, object]:
        """Return the state for an exact resume with only this rank's shards of sharded tensors (see `KeepsParts.parts`)."""
        return self._engine.state(parts=True)

    def room(self, place: str, saved: Tensor) -> Tensor | None:
        """Return an empty tensor for the value of `parts` at a dotted path, or None if this rank keeps the whole value."""
        own = self._sharded_tensors.get(
            place, self._sharded_tensors.get(place.rpartition(".")[0])
        )  # a moment's path is below its weight's
        return None if own is None or own.shape != saved.shape else torch.empty_like(own, dtype=saved.dtype)

    def load_state(self, state: Mapping[str, object]) -> None:
        """Restore the result of `state` or `parts` exactly. The state may come from a run with any number of ranks."""
        with self._sharded(changes=True):
            self._engine.load_state(state)


class ShardedBase:
    """The weights of one model under FSDP2 (`fully_shard`). The process holds either all weights or only its shard.

    FSDP gathers the weights of a block before the block and frees them after the block, in forward and backward passes,
    using hooks around `forward` and around registered methods. `transformers` calls its modules, which triggers the
    hooks. The flat pass does not call modules, so each block is registered as a method. The whole pass is a registered
    method for both kinds of passes.
    """

    def __init__(
        self, model: LanguageModel, mesh: DeviceMesh, settings: Sharding, *, sampled: bool, headed: bool
    ) -> None:
        """Shard the weights over the mesh. The weights stay sharded unless the model is `sampled` from."""
        self._model, self._sampled = model, sampled
        self._reshards = settings.reshard_after_forward
        model.computes_on = model.device
        root: Any = model.model
        offload: OffloadPolicy = OffloadPolicy()
        if settings.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=model.device.type != "cpu")
        param, reduce = DTYPES[settings.param_dtype], DTYPES[settings.reduce_dtype]
        # Inputs keep their type: the residual stream is float32, and autocast rounds the inputs of products.
        precision = MixedPrecisionPolicy(
            param_dtype=None if param == torch.float32 else param,
            reduce_dtype=None if reduce == param else reduce,
            cast_forward_inputs=False,
        )
        shard = partial(
            fully_shard,
            mesh=mesh,
            shard_placement_fn=beside_split,
            mp_policy=precision,
            offload_policy=offload,
        )
        blocks: list[Any] = []
        if model.flat is not None:
            blocks = list(model.flat.layers)
            for block in blocks:
                block.flat_block = MethodType(_block, block)
        else:
            with suppress(ModelError):  # without marked blocks the model is gathered as one piece
                blocks = blocks_of(model.body)[::-1]  # inner modules first
            model.model.get_input_embeddings().register_forward_hook(self._lead_back)
        for block in blocks:
            shard(block, reshard_after_forward=self._reshards)
            if model.flat is not None:
                register_fsdp_forward_method(block, "flat_block")
        # The head's weights are read after the pass, so the root keeps its gathered weights.
        shard(root, reshard_after_forward=False)
        root.shared_pass = MethodType(self._pass, root)
        register_fsdp_forward_method(root, "shared_pass")
        self._root, self._parts = (
            root,
            [module for module in root.modules() if isinstance(module, FSDPModule)],
        )
        for part in self._parts:
            part.set_gradient_divide_factor(
                1.0
            )  # compute sums, because the engine divides by the global weight
            part.set_force_sum_reduction_for_comms(True)
        # Passes of a policy read the head; passes over a single token and passes of critics do not.
        root.set_reduce_scatter_unused_params(headed)
        self.shard()
        # The first pass determines the root module, so it must not be a single block called by a sampler.
        plan = plan_sequences([1], model.device)
        nothing = torch.zeros(1, dtype=torch.long, device=model.device)
        with torch.no_grad(), model.computing([(None, 0, 1)]):
            model.hidden(nothing, nothing, plan)
        self.shard()

    def shard(self) -> None:
        """Keep only this process's shard of the weights, and gather weights during the computation."""
        for part in self._parts:
            if part is not self._root:
                part.set_reshard_after_forward(self._reshards, recurse=False)
            part.reshard()
        self._model.sharded_pass = self._model.model.shared_pass

    def gather(self) -> None:
        """Gather all weights for the sampler. A model without a sampler stays sharded."""
        if not self._sampled:
            return
        self._model.sharded_pass = None
        for part in self._parts:
            # A sampler's calls must not wait for other processes.
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()

    def _lead_back(self, _embeddings: nn.Module, _inputs: object, embedded: Tensor) -> None:
        """Make the backward pass of every process go through every block, independently of which adapters the process's rows use."""
        if self._model.sharded_pass is not None and torch.is_grad_enabled() and not embedded.requires_grad:
            embedded.requires_grad_()

    def _pass(
        self, _root: Any, tokens_N: Tensor, positions_N: Tensor, plan: AttentionPlan, run: Any
    ) -> Tensor:
        if self._model.flat is None:
            return whole_pass(self._model, tokens_N, positions_N, plan, run)
        layers = self._model.flat.layers

        def block(own: Any, number: int, x_ND: Tensor, *rest: Any) -> Tensor:
            if number == 0 and torch.is_grad_enabled() and not x_ND.requires_grad:
                # For the same reason as `_lead_back`.
                x_ND = x_ND.detach().requires_grad_()
            after_ND: Tensor = layers[number].flat_block(own, run, number, x_ND, *rest)
            return after_ND

        return whole_pass(self._model, tokens_N, positions_N, plan, block)


def _block(_layer: Any, own: Any, run: Any, *args: Any) -> Any:
    """Run a block directly or, if `run` is given, through `run`, which keeps only the block's input and recomputes the block."""
    return own(*args) if run is None else run(own, *args)
