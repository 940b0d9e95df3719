"""The train engine on one device, in which all learners on a base model share one forward and one backward pass.

An update accumulates the sums of losses and their gradients, compares the log-probs of trainer and sampler, divides the
gradient of each learner by its global weight, and takes the optimiser step. The module `learner.py` contains a
learner's weights and optimiser. The module `sharing.py` splits a step over processes.

Each learner has its own gradient clipping, normalisation and optimiser step, so a joint update is equivalent to
training every learner separately.

In tensor shapes, N is the number of flat tokens, K of target tokens and T of targets of one sample, and D is the hidden
size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kapelle.algorithm import Outputs
from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import Batch, MicroBatch, minibatches, pack, passes, token_keys
from kapelle.engines.train.parity import PARITY, check_parity, rounded_as
from kapelle.engines.train.pass_size import CPU_TOKENS, chosen_tokens, token_bytes
from kapelle.engines.train.protocol import (
    HEAD,
    CountsTokens,
    Examines,
    Objective,
    Published,
    TrainEngine,
    TrainSetup,
    UpdateLimits,
)
from kapelle.engines.train.torch.large_head import Entropy, token_statistics
from kapelle.engines.train.torch.learner import Learner, distributed_like, gathered, take_steps
from kapelle.engines.train.torch.sharing import AmongRanks, Gaps, UpdateSums, add_metric, means
from kapelle.errors import CheckpointError, ContextError, EngineError, ModelError, NumericsError
from kapelle.functional.distributions import Histogram, added
from kapelle.functional.divergences import TokenStatistics
from kapelle.models.language_model import LanguageModel, copy_language_model
from kapelle.models.lora_bank import copy_weights
from kapelle.models.outline import outline_of
from kapelle.rows import Column, Sample
from kapelle.runtime.interrupts import stop_if_requested
from kapelle.runtime.randomness import derive_seed
from kapelle.runtime.tensors import read_together
from kapelle.team import Critic, Policy, embedder_name, reference_name

LOG = logging.getLogger(__name__)

EASED = (
    "Set `training.gradient_checkpointing: true`, `model.dtype: bfloat16` or a lower `sampling.max_tokens`, or reduce the device's "
    "other memory use (`kapelle plan` lists it)."
)
"""Advice for error messages about running out of memory."""

Result = TypeVar("Result")

EqualisePasses = Callable[[Mapping[str, Sequence[tuple[list[int], Batch]]]], list[tuple[list[int], Batch]]]
"""A function that receives the passes over every base model, by the name of a learner on it, and returns the passes
that this process takes, in order."""


@dataclass(slots=True)
class Placement:
    """The model and the adapter of a learner, reference policy or embedder."""

    model: LanguageModel
    adapter: str | None
    critic: bool = False
    head_alone: bool = False
    """Whether the learner trains only the value head of a critic."""


class TorchTrainEngine(TrainEngine, Examines, CountsTokens):
    """A train engine for policies and critics on models in this process's memory."""

    def __init__(
        self,
        setup: TrainSetup,
        *,
        in_lockstep: bool = False,
        equalise: EqualisePasses | None = None,
        share_out: Callable[[Sequence[LanguageModel]], None] | None = None,
        together: int = 1,
        complete: Callable[[], None] = lambda: None,
    ) -> None:
        """Add adapters and value heads to the models, and create one learner for each trained policy and critic.

        The processes of `setup.ranks` share the work of every step. If these processes must take the same passes, set
        `in_lockstep`, and `equalise` determines the passes. The function `share_out` receives the frozen copies of base
        models (references, embedders) before adapters, heads and learners are created. With `together` greater than 1,
        this number of consecutive ranks hold one model and work on the same share of a step. The function `complete`
        sums the parts of a gradient over these ranks once per step.
        """
        self.limits, self._seed, self._in_lockstep = setup.limits, setup.seed, in_lockstep
        self.placements: dict[str, Placement] = {}
        self.learners: dict[str, Learner] = {}
        """The learners by name: first the trained policies, then the trained critics."""
        self._policies = [policy for policy in setup.policies if policy.endpoint is None]
        copies = self._copied_bases(setup)
        if share_out is not None:
            share_out(copies)
        learning: Sequence[Policy | Critic] = [*self._policies, *setup.critics]
        for learner in learning:
            model, name, lora = setup.models[learner.base], learner.name, learner.lora
            # An adapter that an earlier engine added to a model in memory is trained further.
            if lora and name not in model.bank.adapters:
                model.bank.add(name, lora, derive_seed(setup.seed, "adapter", name))
            elif lora and model.bank.adapters[name] != lora:
                raise ModelError(
                    f"Model '{model.name}' already has an adapter '{name}' with different `lora` settings. Load the "
                    "model again, or restore the original `lora` settings."
                )
            critic = isinstance(learner, Critic)
            if critic and name not in model.value_heads:
                model.add_value_head(name)
            head_alone = isinstance(learner, Critic) and lora is None and not learner.whole
            self.placements[name] = Placement(model, name if lora else None, critic, head_alone)
            if learner.trained:
                parameters = cast("Mapping[str, torch.nn.Parameter]", self.weights(name))
                narrow = next((key for key, p in parameters.items() if p.dtype != torch.float32), None)
                if narrow is not None:
                    raise ModelError(
                        f"'{name}' trains all weights of '{model.name}', but '{narrow}' is stored in "
                        f"{str(parameters[narrow].dtype).removeprefix('torch.')}, so that small steps would be lost to "
                        "rounding. Pass the model with its weights in float32, or train an adapter (`weights: lora`)."
                    )
                settings, scaled = setup.optimizer_of(learner), model.dtype == torch.float16
                steps = setup.limits.total_steps
                frozen = model.frozen_parameters if lora is None else ()
                self.learners[name] = Learner(name, parameters, settings, settings.lr, steps, scaled, frozen)
        if setup.references:
            self.refresh_references()
        self.forward = ForwardPass(self.placements, setup.limits, equalise, self._to_come)
        self._sharing = AmongRanks(setup.ranks, in_lockstep=in_lockstep, together=together)
        self._complete = complete
        self._spread: dict[str, Histogram] = {}
        """Histograms of tokens of the updates since the last call of `distributions`."""

    def _copied_bases(self, setup: TrainSetup) -> list[LanguageModel]:
        """Create the references and embedders of whole base models, and return their frozen copies."""
        copies: dict[str, LanguageModel] = {}
        embedding: dict[int, LanguageModel] = {}
        for policy in self._policies:
            model, whole = setup.models[policy.base], policy.trained and policy.lora is None
            reference, embedder = reference_name(policy.name), embedder_name(policy.name)
            if setup.references and whole:
                copies[reference] = copy_language_model(model, reference)
                self.placements[reference] = Placement(copies[reference], None)
            if setup.embedders:
                # Copy each policy's current base: the base under its adapter, or a copy of a base that is trained.
                if whole and id(model) not in embedding:
                    copies[embedder] = embedding[id(model)] = copy_language_model(model, embedder)
                self.placements[embedder] = Placement(embedding[id(model)] if whole else model, None)
        return list(copies.values())

    def _to_come(self, device: torch.device) -> int:
        """Return the number of bytes that future gradients and moments of learners will need on a device."""
        return sum(each.bytes_to_come for each in self.learners.values() if each.device == device)

    @property
    def versions(self) -> Mapping[str, int]:
        """Mapping from each trained policy to the number of changes of its weights."""
        return {p.name: self.learners[p.name].version for p in self._policies if p.trained}

    def model_of(self, name: str) -> LanguageModel:
        """Return the base model of a learner, reference policy or embedder."""
        return self.placements[name].model

    def renderer(self, learner: str) -> WritingRenderer:
        """Return the renderer of the model of a policy or critic."""
        return self.placements[learner].model.renderer

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return the weights of a policy, critic or reference policy by name, without copying the tensors."""
        if name in self.learners:
            return self.learners[name].parameters
        model, adapter = self.placements[name].model, self.placements[name].adapter
        found: dict[str, Tensor] = {}
        if not self.placements[name].head_alone:
            found |= model.bank.parameters(adapter) if adapter else model.base_parameters()
        if self.placements[name].critic:
            found |= {f"{HEAD}{key}": tensor for key, tensor in model.value_heads[name].named_parameters()}
        return found

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set the weights of a policy, critic or reference policy. Raises ModelError if names or shapes do not match."""
        copy_weights(self.weights(name), weights, f"'{name}'")
        if name in self.learners:
            self.learners[name].replaced()

    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state over the tokens before each sample's targets, as float32 of shape (D,)."""
        return self._sharing.rows(samples, self.forward.embed)

    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the log-probs or values of each sample's targets as float32, of shape (T,), computed without dropout."""
        self._check_critics_context(samples)
        return self._sharing.rows(samples, self.forward.score)

    def examine(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-prob and entropy (in nats) of each target token of policy samples, as float32 of shape (T, 2), without dropout."""
        return self._sharing.rows(samples, partial(self.forward.score, entropy=True))

    def _check_critics_context(self, samples: Sequence[Sample]) -> None:
        """Raise ContextError if the input of a critic exceeds the context of its model, because the input is never truncated."""
        for sample in samples:
            placement, tokens = self.placements[sample.learner], sample.targets[-1]
            if placement.critic and tokens > placement.model.renderer.context:
                raise ContextError(
                    f"'{sample.learner}' has {tokens} tokens of input, but its model's context is "
                    f"{placement.model.renderer.context} tokens. A central critic reads what all agents read and wrote. "
                    "Use a model with a longer context (`model.embedded.context` for the embedded one), shorter "
                    "prompts, fewer rounds, a lower `sampling.max_tokens`, or `algorithm.name: ippo`, whose critics "
                    "read only what their own agent read and wrote."
                )

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update, in which every learner is trained on its own samples.

        Raises ParityError, before any weights change, if the log-probs of trainer and sampler disagree. Raises
        NumericsError if a loss or gradient is not finite.
        """
        self._check_critics_context(samples)
        assert samples, "an update needs samples"
        totals: dict[str, list[float]] = {}
        # With dropout, the log-probs of the update's own passes differ from the sampler's, so a pass without dropout is
        # compared first.
        dropout = self._has_dropout()
        if objective.parity and dropout:
            self._compare(self._gaps(samples), samples, totals)
        for epoch in range(objective.epochs):
            seeds = {
                name: derive_seed(self._seed, name, learner.steps, epoch)
                for name, learner in self.learners.items()
            }
            for number, chosen in enumerate(minibatches(samples, objective.minibatches, seeds)):
                compared = objective.parity and not dropout and epoch == number == 0
                self._step([samples[k] for k in chosen], objective, totals, compared)
        return means(totals)

    def _step(
        self, samples: Sequence[Sample], objective: Objective, totals: dict[str, list[float]], compared: bool
    ) -> None:
        """Take one optimiser step of every learner of these samples. With `compared`, first compare log-probs with the sampler."""
        learners = self.learners
        try:
            sums = self._sharing.summed(samples, partial(self.accumulate, objective, compared), learners)
            for name in sorted(sums.bad):
                if self.limits.non_finite == "stop":
                    raise NumericsError(
                        f"The loss of '{name}' is not finite at its update {learners[name].steps}. Check this step's "
                        "rewards, lower `optimizer.lr`, or set `training.non_finite: skip`."
                    )
            if compared:
                self._compare(sums.gaps, samples, totals)
            weights: dict[Learner, float] = {}
            for name, learner in learners.items():
                weight = sums.weight.get(name, 0.0)
                if name not in sums.bad and weight != 0:
                    weights[learner] = weight
                elif name in sums.weight or name in sums.bad:
                    learner.forget_gradient()
                    add_metric(totals, f"skipped/{name}", 1.0, 1.0)
            taken = take_steps(weights, self.limits.non_finite, self._sharing.agreed)
            for learner, row in zip(weights, taken, strict=True):
                for metric, value in row.items():
                    add_metric(totals, f"{metric}/{learner.name}", value, 1.0)
                for metric, (total, share) in sums.sums[learner.name].items():
                    add_metric(totals, metric, total, share)
            for name, counts in sums.spread.items():
                if self.learners[name.partition("/")[2]] in weights:
                    known = self._spread.get(name)
                    self._spread[name] = counts if known is None else added([known, counts])
        except BaseException:
            for learner in learners.values():
                learner.forget_gradient()  # otherwise the next update would include it
            raise

    def distributions(self) -> Mapping[str, Histogram]:
        """Return histograms of the policies' tokens in the updates since the last call (see `CountsTokens.distributions`)."""
        found, self._spread = self._spread, {}
        return found

    def accumulate(self, objective: Objective, compared: bool, samples: Sequence[Sample]) -> UpdateSums:
        """Accumulate the gradients of the samples' losses, and return the sums of losses and weights.

        Passes do not wait for each other: losses are read after all passes have been launched. If a loss is then not
        finite and must be skipped, all passes are repeated, and each pass waits for its losses. Processes that take
        every pass together cannot repeat passes separately, so each of their passes waits from the start.
        """
        leaves_out = self.limits.non_finite == "skip"

        def taken(*, waits: bool) -> UpdateSums:
            return self.forward.fitting(
                lambda: self._pass_over(samples, objective, compared=compared, waits=waits)
            )

        sums = taken(waits=leaves_out and self._in_lockstep)
        if sums.bad and leaves_out and not self._in_lockstep:
            sums = taken(waits=True)
        self._complete()
        return sums

    def _pass_over(
        self, samples: Sequence[Sample], objective: Objective, *, compared: bool, waits: bool
    ) -> UpdateSums:
        """Take all forward and backward passes.

        With `waits`, losses that are not finite are excluded from the backward pass.
        """
        for learner in self.learners.values():
            learner.forget_gradient()  # drop the gradient of passes that are repeated
        sums = UpdateSums()
        entropy = Entropy.LEARNED if objective.entropy else Entropy.MEASURED
        with self._dropout() as keys_of:
            for chosen, batch in self.forward.batches(samples):
                losses, found = [], []
                for name, part, output in self.forward.outputs(batch, entropy, keys_of(batch)):
                    if isinstance(output, Tensor):
                        assert objective.critic_loss is not None, "critic samples need a critic loss"
                        loss = objective.critic_loss(output, part.targets)
                    else:
                        entropy_K = output.entropy_K if objective.entropy else None
                        loss = objective.policy_loss(Outputs(output.logp_K, entropy_K), part.targets)
                    found.append((name, part, output, loss))
                totals = read_together([loss.total for *_, loss in found]) if waits else []
                finite = [bool(total.isfinite()) for total in totals] if waits else [True] * len(found)
                for (name, part, output, loss), is_finite in zip(found, finite, strict=True):
                    learner = self.learners[name]
                    if not is_finite:
                        sums.bad.add(name)
                        continue
                    sums.add(name, loss)
                    if isinstance(output, TokenStatistics):
                        sums.add_statistics(name, output, part.targets)
                        if compared:
                            members = tuple(chosen[k] for k in part.samples)
                            sums.add_gaps(name, output.logp_K, part.targets, members)
                    factor = objective.critic_coefficient if isinstance(output, Tensor) else 1.0
                    losses.append(learner.scaled(loss.total * factor))
                if self.forward.anchor is not None:
                    losses.append(self.forward.anchor)
                if losses:
                    self._add_gradients(losses)
        sums.read()
        return sums

    def _add_gradients(self, losses: Sequence[Tensor]) -> None:
        """Run the backward pass of losses. On a GPU, few kernels add all gradients of adapters to those of earlier passes."""
        earlier = [
            (parameter, parameter.grad)
            for name, learner in self.learners.items()
            if self.placements[name].adapter is not None
            for parameter in learner.parameters.values()
            if parameter.is_cuda and parameter.grad is not None and not isinstance(parameter, DTensor)
        ]
        for parameter, _ in earlier:
            parameter.grad = None
        torch.autograd.backward(losses)
        both = [(total, parameter.grad) for parameter, total in earlier if parameter.grad is not None]
        if both:
            torch._foreach_add_(*map(list, zip(*both, strict=True)))
        for parameter, total in earlier:
            parameter.grad = total

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        """Compare the `behaviour` column of samples with the log-probs of the given weights (see `TrainEngine.check_parity`)."""
        totals: dict[str, list[float]] = {}
        current: list[tuple[Tensor, Tensor]] = []
        try:
            for name, others in (weights or {}).items():
                own = self.weights(name)
                current += [(tensor, tensor.detach().clone()) for tensor in own.values()]
                laid_out = {
                    key: distributed_like(t, own[key]) if key in own else t for key, t in others.items()
                }
                copy_weights(own, laid_out, f"'{name}'")
            self._compare(self._gaps(samples), samples, totals)
        finally:
            with torch.no_grad():
                for tensor, before in current:
                    tensor.copy_(before)
        return means(totals)

    def _gaps(self, samples: Sequence[Sample]) -> list[Gaps]:
        policy = [k for k, sample in enumerate(samples) if Column.BEHAVIOUR in sample.columns]
        scored = self._sharing.rows([samples[k] for k in policy], self.forward.score)
        gaps = []
        for k, scored_T in zip(policy, scored, strict=True):
            off_T, mask_T = scored_T - samples[k].columns[Column.BEHAVIOUR], samples[k].mask
            gaps.append(Gaps(samples[k].learner, off_T if mask_T is None else off_T[mask_T.bool()], (k,)))
        return gaps

    def _compare(
        self, gaps: Sequence[Gaps], samples: Sequence[Sample], totals: dict[str, list[float]]
    ) -> None:
        """Compare the gaps for each type of rounding separately, so that half precision in one model does not relax other bounds."""
        models = {name: (placement.model, placement.adapter) for name, placement in self.placements.items()}
        kinds = {name: rounded_as(model) for name, (model, _) in models.items()}
        for kind in dict.fromkeys(kinds[gap.learner] for gap in gaps):
            own = [gap for gap in gaps if kinds[gap.learner] == kind]
            bound = self.limits.parity_tolerance or PARITY[kind]
            check_parity(own, samples, kind, bound, totals, models)

    def publish(self) -> Mapping[str, Published]:
        """Return the weights and versions of the policies that changed since the last call."""
        changed = {
            policy.name: self.learners[policy.name]
            for policy in self._policies
            if policy.trained and self.learners[policy.name].changed
        }
        for learner in changed.values():
            learner.changed = False
        return {name: Published(learner.parameters, learner.version) for name, learner in changed.items()}

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies exactly, including weights, optimiser state and reference policies."""
        self.learners[one].exchange(self.learners[other])
        reference, other_reference = reference_name(one), reference_name(other)
        if reference not in self.placements:
            return
        with torch.no_grad():
            pairs = zip(self.weights(reference).values(), self.weights(other_reference).values(), strict=True)
            for first, second in pairs:
                copy = first.clone()
                first.copy_(second)
                second.copy_(copy)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its current trained policy."""
        for policy in self._policies:
            if not policy.trained:
                continue
            model, name = self.placements[policy.name].model, reference_name(policy.name)
            if policy.lora:
                model.bank.copy(policy.name, name)
                self.placements[name] = Placement(model, name)
            elif name in self.placements:
                with torch.no_grad():
                    for key, tensor in self.weights(name).items():
                        tensor.copy_(self.learners[policy.name].parameters[key])

    @property
    def _models(self) -> list[LanguageModel]:
        """Return every model in use once."""
        return list({id(placement.model): placement.model for placement in self.placements.values()}.values())

    def _has_dropout(self) -> bool:
        """Return whether any adapter has dropout."""
        return any(lora.dropout for model in self._models for lora in model.bank.adapters.values())

    @contextmanager
    def _dropout(self) -> Iterator[Callable[[Batch], Tensor | None]]:
        """Turn on the dropout of adapters, and yield a function that returns the dropout keys of a batch.

        A dropout mask depends on the run's seed, the number of the learner's steps, and the tokens up to the masked
        token, so the mask is the same for any split of the samples of a step. The base model has no dropout, because
        the trained distribution would then differ from the sampled distribution.
        """
        if not self._has_dropout():
            yield lambda _: None
            return
        seeds = {
            name: derive_seed(self._seed, "dropout", name, learner.steps)
            for name, learner in self.learners.items()
        }
        for model in self._models:
            model.bank.train(on=True)
        try:
            yield lambda batch: token_keys(batch, seeds)
        finally:
            for model in self._models:
                model.bank.train(on=False)

    def state(self, *, parts: bool = False) -> dict[str, object]:
        """Return the state for an exact resume, as a tree of tensors and plain Python values (see `Learner.state`)."""
        references = {
            name: {
                key: tensor.detach() if parts else gathered(tensor.detach())
                for key, tensor in self.weights(name).items()
            }
            for name in self.placements
            if name.startswith(reference_name(""))
        }
        return {
            "learners": {name: learner.state(parts=parts) for name, learner in self.learners.items()},
            "references": references,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state` exactly."""
        if not {"learners", "references"} <= state.keys():
            raise CheckpointError(
                f"The state contains {sorted(state)}, which are not the fields of the train engine `torch`. Set "
                "`train_engine.name` to the value used when the checkpoint was written."
            )
        self._spread = {}  # drops histograms of an undone update
        for name, entry in state["learners"].items():
            self.learners[name].load_state(entry)
            self.learners[name].changed = True
        with torch.no_grad():
            for name, tensors in state["references"].items():
                for key, tensor in self.weights(name).items():
                    tensor.copy_(distributed_like(tensors[key], tensor))


class ForwardPass:
    """Forward passes that evaluate all learners on a base model together."""

    def __init__(
        self,
        placements: Mapping[str, Placement],
        limits: UpdateLimits,
        equalise: EqualisePasses | None = None,
        to_come: Callable[[torch.device], int] = lambda _: 0,
    ) -> None:
        """Evaluate learners, references and embedders by name, with at most `limits.microbatch_tokens` tokens per pass.

        With `limits.gradient_checkpointing`, a backward pass recomputes each decoder block. The function `to_come`
        returns the number of bytes that learners on a device will need in addition to the memory of passes.
        """
        self.placements = placements
        self.limits = limits
        self._equalise = equalise
        self._to_come = to_come
        self._most_tokens: dict[tuple[str, torch.device], int] = {}
        """The maximum number of tokens in a pass over each model. The number is set by the user or chosen by the
        engine, and it is halved after memory has run out."""
        self._passes: dict[tuple[str, torch.device], int] = {}
        """The number of tokens in the largest current pass over each model."""
        self._latest: tuple[tuple[str, torch.device], int] | None = None
        """The model of the latest pass and the number of tokens in this pass."""
        self.anchor: Tensor | None = None
        """A loss of zero that depends on the last pass, if every process must run the backward pass of this pass;
        otherwise None."""

    @torch.no_grad()
    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state over the tokens before each sample's targets, as float32 of shape (D,)."""
        return self.fitting(lambda: self._embed(samples))

    def _embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        means: dict[int, Tensor] = {}
        for chosen, batch in self.batches(samples):
            placement = self.placements[batch.owners[0][0]]
            with placement.model.computing([(None, first, last) for _, first, last in batch.owners]):
                hidden_ND = placement.model.hidden(
                    batch.tokens_N, batch.positions_N, batch.plan, images=batch.images
                )
            hidden_KD = hidden_ND.index_select(0, batch.source_K).float()
            for part in batch.parts.values():
                rows = hidden_KD[part.place].split(part.counts)
                means |= {chosen[k]: rows_TD.mean(0) for k, rows_TD in zip(part.samples, rows, strict=True)}
        return [each.float() for each in read_together([means[k] for k in range(len(samples))])]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], *, entropy: bool = False) -> list[Tensor]:
        """Return the log-probs or values of each sample's targets as float32, of shape (T,), computed without dropout.

        With `entropy`, return log-probs and entropies of shape (T, 2) instead. With `entropy`, all samples must belong
        to policies.
        """
        return self.fitting(lambda: self._score(samples, entropy))

    def _score(self, samples: Sequence[Sample], entropy: bool) -> list[Tensor]:
        scored: list[tuple[list[int], MicroBatch, Tensor]] = []
        for chosen, batch in self.batches(samples):
            found = self.outputs(batch, Entropy.MEASURED if entropy else Entropy.LEFT_OUT)
            for _learner, part, output in found:
                values_K = output.logp_K if isinstance(output, TokenStatistics) else output
                if entropy and isinstance(output, TokenStatistics):
                    values_K = torch.stack([output.logp_K, output.entropy_K], 1)
                scored.append((chosen, part, values_K))
        answers: dict[int, Tensor] = {}
        for (chosen, part, values_K), flat in zip(
            scored, read_together([values_K for *_, values_K in scored]), strict=True
        ):
            columns = flat.float().view(values_K.shape).split(part.counts)
            answers |= {chosen[k]: column for k, column in zip(part.samples, columns, strict=True)}
        return [answers[k] for k in range(len(samples))]

    def outputs(
        self, batch: Batch, entropy: Entropy, keys_N: Tensor | None = None
    ) -> list[tuple[str, MicroBatch, TokenStatistics | Tensor]]:
        """Run one forward pass and return the statistics or values of each learner's targets, of shape (K,).

        The tensor `keys_N` contains the dropout keys of the tokens if dropout is on.
        """
        placement = self.placements[batch.owners[0][0]]
        route = [(self.placements[name].adapter, first, last) for name, first, last in batch.owners]
        recompute = self.limits.gradient_checkpointing and torch.is_grad_enabled()
        with placement.model.computing(route, keys_N, batch.experts_NLk):
            hidden_ND = placement.model.hidden(
                batch.tokens_N, batch.positions_N, batch.plan, recompute=recompute, images=batch.images
            )
            if self._equalise is not None and torch.is_grad_enabled():
                self.anchor = hidden_ND.sum() * 0
            hidden_KD = hidden_ND.index_select(0, batch.source_K)
            policies = [name for name in batch.parts if not self.placements[name].critic]
            statistics = _statistics(placement.model, hidden_KD, batch, policies, entropy)
            return [
                (
                    name,
                    part,
                    statistics[name]
                    if name in statistics
                    else placement.model.values(name, hidden_KD[part.place]),
                )
                for name, part in batch.parts.items()
            ]

    def batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Batch]]:
        """Pack the samples of each base model and yield each batch with the indices of its samples.

        Raises StopRequested before a batch if the run should stop.
        """
        bases: dict[int, list[int]] = {id(self.placements[name].model): [] for name in self.placements}
        for k, sample in enumerate(samples):
            bases.setdefault(id(self.placements[sample.learner].model), []).append(k)
        names = {id(placement.model): name for name, placement in self.placements.items()}
        found: dict[str, list[tuple[list[int], Batch]]] = {name: [] for name in names.values()}
        for base, chosen in bases.items():
            model = self.placements[names[base]].model
            for members, room in passes(chosen, samples, self._room(model)):
                own = [samples[k] for k in members]
                packed = pack(own, room, model.device, model.flat is not None, model.masks)
                found[names[base]].extend((members, batch) for batch in packed)
        taken = [each for own in found.values() for each in own]
        if self._equalise is not None:
            taken = self._equalise(found)
        over = [_key(self.placements[batch.owners[0][0]].model) for _, batch in taken]
        self._passes = {}
        for key, (_, batch) in zip(over, taken, strict=True):
            self._passes[key] = max(len(batch.tokens_N), self._passes.get(key, 0))
        for key, (members, batch) in zip(over, taken, strict=True):
            stop_if_requested()
            self._latest = key, len(batch.tokens_N)
            yield members, batch

    def _room(self, model: LanguageModel) -> int:
        """Return the maximum number of tokens in a pass over a model. With `auto` on a GPU, the number is chosen at the first pass."""
        key = _key(model)
        if key not in self._most_tokens:
            self._most_tokens[key] = self.limits.microbatch_tokens or self._chosen(model)
        return self._most_tokens[key]

    def _chosen(self, model: LanguageModel) -> int:
        device = model.device
        if device.type != "cuda":
            return CPU_TOKENS
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(
            device
        )  # memory that torch's allocator keeps
        outline = outline_of(model.model)
        of_token = token_bytes(
            outline.layers,
            outline.hidden,
            model.dtype.itemsize,
            recompute=self.limits.gradient_checkpointing,
        )
        return chosen_tokens(free - self._to_come(device), of_token)

    def fitting(self, work: Callable[[], Result]) -> Result:
        """Return the result of `work`. If a pass runs out of memory, repeat the whole work with passes that are half as large.

        Each attempt starts from the beginning, because a failed backward pass may have added to a gradient. The smaller
        pass size is kept for later calls. Raises EngineError if a single sequence or a bundle of samples does not fit
        in memory.
        """
        failed: dict[tuple[str, torch.device], int] = {}
        """The number of tokens in the first failed pass over each model."""
        while True:
            try:
                found = work()
            except torch.OutOfMemoryError as error:
                if self._latest is None:
                    raise
                key, size = self._latest
                most = self._most_tokens[key]
                if self._equalise is not None:
                    raise EngineError(
                        f"A pass of {size} tokens does not fit in memory. Processes that shard a base take every pass "
                        f"together, so the pass cannot be repeated. Set `training.microbatch_tokens` below {size}. "
                        f"{EASED} The device reports: {error}"
                    ) from error
                if size > most or size <= 1:
                    raise EngineError(
                        f"A pass of {size} tokens does not fit in memory and cannot be split, because it consists of one "
                        f"sequence, or of samples that a loss compares. {EASED} The device reports: {error}"
                    ) from error
            else:
                for (name, device), tokens in failed.items():
                    LOG.warning(
                        "A pass of %d tokens does not fit in memory: passes over '%s' have at most %d from now on. "
                        "Gradients do not change; set `training.microbatch_tokens=%d` to use this limit from the start.",
                        tokens,
                        name,
                        self._most_tokens[name, device],
                        self._most_tokens[name, device],
                    )
                return found
            # The exception keeps the failed pass's tensors alive, and is released here.
            torch.cuda.empty_cache()
            failed.setdefault(key, size)
            self._most_tokens[key] = max(1, min(most, self._passes[key]) // 2)


def _statistics(
    model: LanguageModel, hidden_KD: Tensor, batch: Batch, policies: Sequence[str], entropy: Entropy
) -> dict[str, TokenStatistics]:
    """Return the statistics of each policy's targets. On a GPU, policies with consecutive targets share one computation."""
    places = {name: batch.parts[name].place for name in policies}
    ends = [0, *(place.stop for place in places.values())]
    if (
        policies
        and hidden_KD.device.type == "cuda"
        and ends[:-1] == [place.start for place in places.values()]
    ):
        joint = token_statistics(model, hidden_KD, batch, slice(0, ends[-1]), entropy)
        columns = (column_K.split([b - a for a, b in pairwise(ends)]) for column_K in joint)
        return {
            name: TokenStatistics(*own)
            for name, own in zip(policies, zip(*columns, strict=True), strict=True)
        }
    return {name: token_statistics(model, hidden_KD, batch, place, entropy) for name, place in places.items()}


def _key(model: LanguageModel) -> tuple[str, torch.device]:
    """Return a key that is equal for models with equal memory needs. Copies of one model on one device have the same key."""
    return model.name, model.device
