"""The train engine on one device: all learners that share a base in one forward and one backward pass.

Shapes: K target tokens, D hidden size, T targets of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from kapelle.algorithm import Loss, Outputs
from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.arbitration import arbitrate
from kapelle.engines.train.batch import Batch, Part, Sample, pack
from kapelle.engines.train.parity import PARITY, check_parity
from kapelle.engines.train.protocol import Objective, Published, embedder_name, reference_name
from kapelle.engines.train.torch.bundles import breakable, minibatches, passes
from kapelle.engines.train.torch.head import Entropy, token_statistics
from kapelle.engines.train.torch.learner import Learner
from kapelle.engines.train.torch.sums import UpdateSums, book, means
from kapelle.errors import ModelError, NumericsError
from kapelle.functional.divergences import TokenStatistics
from kapelle.models.language_model import LanguageModel, copy_language_model
from kapelle.runtime.seeds import derive_seed
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Critic, Lora, Policy


@dataclass(frozen=True, slots=True)
class UpdateLimits:
    """How the engine works, none of which changes a result but by failing."""

    microbatch_tokens: int = 4096
    parity_tolerance: float | None = None
    non_finite: str = "stop"
    total_steps: int = 1_000_000
    """Optimiser steps of the whole run, for schedules that end."""


@dataclass(slots=True)
class _Home:
    """Where a learner or reference lives."""

    model: LanguageModel
    adapter: str | None
    critic: bool = False


class TorchTrainEngine:
    """Policies and critics on models in this process's memory."""

    def __init__(
        self,
        models: Mapping[str, LanguageModel],
        policies: Sequence[Policy],
        critics: Sequence[Critic],
        optimizer: OptimizerConfig,
        limits: UpdateLimits,
        seed: int,
        references: bool = False,
        embedders: bool = False,
    ) -> None:
        """Add adapters and heads to the models and make one learner for each policy that is trained."""
        self._limits = limits
        self._seed = seed
        self._homes: dict[str, _Home] = {}
        self._learners: dict[str, Learner] = {}
        self._policies = [p for p in policies if p.endpoint is None]
        for policy in self._policies:
            model = models[policy.base]
            if policy.lora:
                self._adapt(model, policy.name, policy.lora)
            self._homes[policy.name] = _Home(model, policy.name if policy.lora else None)
            if policy.trained:
                self._learn(policy.name, model, optimizer, optimizer.lr)
        for critic in critics:
            model = models[critic.base]
            self._adapt(model, critic.name, critic.lora)
            if critic.name not in model.value_heads:
                model.add_value_head(critic.name)
            self._homes[critic.name] = _Home(model, critic.name, critic=True)
            if critic.trained:
                self._learn(critic.name, model, optimizer, optimizer.critic_lr or optimizer.lr)
        if references:
            self.refresh_references()
        if embedders:
            self._add_embedders()

    @property
    def versions(self) -> Mapping[str, int]:
        """Number of changes behind the weights of each trained policy."""
        return {p.name: self._learners[p.name].version for p in self._policies if p.trained}

    @property
    def learners(self) -> Mapping[str, Learner]:
        """Learners by name: trained policies, then critics."""
        return self._learners

    def renderer(self, learner: str) -> WritingRenderer:
        """Return how text becomes the tokens of the model that a policy or critic stands on."""
        return self._homes[learner].model.renderer

    def _adapt(self, model: LanguageModel, name: str, lora: Lora) -> None:
        """Add an adapter, or go on with the one that an earlier engine left on a model in memory."""
        held = model.bank.adapters.get(name)
        if held is None:
            model.bank.add(name, lora, derive_seed(self._seed, "adapter", name))
        elif held != lora:
            raise ModelError(
                f"Model '{model.name}' carries an adapter '{name}' from before, made with other `lora` settings. "
                "Take a fresh model, or the settings of then."
            )

    def _learn(self, name: str, model: LanguageModel, optimizer: OptimizerConfig, lr: float) -> None:
        home = self._homes[name]
        parameters = dict(model.bank.parameters(name) if home.adapter else model.base_parameters())
        if home.critic:
            parameters |= {f"value_head.{k}": p for k, p in model.value_heads[name].named_parameters()}
        scaled = model.dtype == torch.float16
        self._learners[name] = Learner(name, parameters, optimizer, lr, self._limits.total_steps, scaled)

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return the weights of a policy or critic, by name; the very tensors, not copies."""
        home = self._homes[name]
        if name in self._learners:
            return self._learners[name].parameters
        return home.model.bank.parameters(name) if home.adapter else home.model.base_parameters()

    def _add_embedders(self) -> None:
        """Keep, for each policy, its base as it is now: that of an adapter, or a copy of one that is trained."""
        copies: dict[int, LanguageModel] = {}
        for policy in self._policies:
            model = self._homes[policy.name].model
            if policy.trained and policy.lora is None:
                model = copies.setdefault(id(model), copy_language_model(model, embedder_name(policy.name)))
            self._homes[embedder_name(policy.name)] = _Home(model, None)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its trained policy as it is now."""
        for policy in self._policies:
            if not policy.trained:
                continue
            model, name = self._homes[policy.name].model, reference_name(policy.name)
            if policy.lora:
                model.bank.copy(policy.name, name)
                self._homes[name] = _Home(model, name)
            else:
                self._homes[name] = _Home(copy_language_model(model, name), None)

    def exchange(self, one: str, other: str) -> None:
        """Let two policies change places: weights, optimiser state and references, bit for bit."""
        self._learners[one].exchange(self._learners[other])
        ours, theirs = reference_name(one), reference_name(other)
        if ours not in self._homes:
            return
        with torch.no_grad():
            for mine, yours in zip(self.weights(ours).values(), self.weights(theirs).values(), strict=True):
                held = mine.clone()
                mine.copy_(yours)
                yours.copy_(held)

    @torch.no_grad()
    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return the mean last hidden state `_D` (float32) over the tokens before each sample's targets."""
        answers: dict[int, Tensor] = {}
        for chosen, batch in self._batches(samples):
            home = self._homes[batch.owners[0][0]]
            with home.model.computing([(None, first, last) for _, first, last in batch.owners]):
                hidden_ND = home.model.hidden(batch.tokens_N, batch.positions_N, batch.plan)
            hidden_KD = hidden_ND.index_select(0, batch.source_K).float().cpu()
            for part in batch.parts.values():
                counts = part.targets.segment_K.bincount(minlength=part.targets.segments).tolist()
                for k, rows_TD in zip(
                    part.samples, hidden_KD[part.first : part.last].split(counts), strict=True
                ):
                    answers[chosen[k]] = rows_TD.mean(0)
        return [answers[k] for k in range(len(samples))]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return log-probs or values `_T` (float32) of each sample's targets, without dropout."""
        answers: dict[int, Tensor] = {}
        for chosen, batch in self._batches(samples):
            for _learner, part, said_K in self._said(batch, Entropy.LEFT_OUT):
                values_K = said_K.logp_K if isinstance(said_K, TokenStatistics) else said_K
                counts = part.targets.segment_K.bincount(minlength=part.targets.segments).tolist()
                for k, column in zip(part.samples, values_K.split(counts), strict=True):
                    answers[chosen[k]] = column.float().cpu()
        return [answers[k] for k in range(len(samples))]

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        """Take the optimiser steps of one update; every learner on its own samples.

        Raises ParityError before anything moves when trainer and sampler disagree, NumericsError when a loss
        or gradient is not finite.
        """
        assert samples, "an update needs samples"
        totals: dict[str, list[float]] = {}
        dropout = self._drops_out()
        if objective.parity and dropout:
            self._compare(self.parity(samples), samples, totals)
        for epoch in range(objective.epochs):
            seed_of = partial(self._shuffle_seed, epoch=epoch)
            for number, chosen in enumerate(minibatches(samples, objective.minibatches, seed_of)):
                fresh = objective.parity and not dropout and epoch == number == 0
                self._step([samples[k] for k in chosen], objective, totals, fresh)
        return means(totals)

    def parity(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Return |trainer − sampler| log-prob of every target of every policy sample."""
        policy = [sample for sample in samples if "behaviour" in sample.columns]
        scored = self.score(policy)
        return [(s - sample.columns["behaviour"]).abs() for s, sample in zip(scored, policy, strict=True)]

    def check_parity(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Compare the samples' `behaviour` with what the weights of this moment say; see the protocol."""
        totals: dict[str, list[float]] = {}
        self._compare(self.parity(samples), samples, totals)
        return means(totals)

    def _compare(
        self, gaps: Sequence[Tensor], samples: Sequence[Sample], totals: dict[str, list[float]]
    ) -> None:
        homes = {name: (home.model, home.adapter) for name, home in self._homes.items()}
        bound = self._limits.parity_tolerance or max(PARITY[model.dtype] for model in self._models())
        check_parity(gaps, bound, totals, partial(arbitrate, samples, self.score, homes))

    def _step(
        self, samples: Sequence[Sample], objective: Objective, totals: dict[str, list[float]], fresh: bool
    ) -> None:
        sums = UpdateSums()
        try:
            self._accumulate(samples, objective, sums)
            if fresh:
                self._compare(sums.gaps, samples, totals)
            for name in self._learners:
                if name in sums.weight or name in sums.bad:
                    self._move(name, sums, totals)
        except BaseException:
            for learner in self._learners.values():
                learner.forget_gradient()  # or it would be part of whatever comes next
            raise

    def _accumulate(self, samples: Sequence[Sample], objective: Objective, sums: UpdateSums) -> None:
        entropy = Entropy.LEARNED if objective.entropy else Entropy.MEASURED
        with self._dropping_out():
            for _, batch in self._batches(samples):
                losses = []
                for learner, part, said in self._said(batch, entropy):
                    loss, gap_K = self._loss(objective, part, said)
                    if not bool(torch.isfinite(loss.total)):
                        self._bad_loss(learner)
                        sums.bad.add(learner)
                        continue
                    sums.add(learner, loss)
                    if isinstance(said, TokenStatistics):
                        sums.watch(learner, said, part.targets)
                    sums.gaps.extend([] if gap_K is None else [gap_K])
                    factor = objective.critic_coefficient if self._homes[learner].critic else 1.0
                    losses.append(self._learners[learner].scaled(loss.total * factor))
                if losses:
                    torch.autograd.backward(losses)

    def _move(self, name: str, sums: UpdateSums, totals: dict[str, list[float]]) -> None:
        learner, weight = self._learners[name], sums.weight.get(name, 0.0)
        if name in sums.bad or weight == 0:
            learner.forget_gradient()
            book(totals, f"skipped/{name}", 1.0, 1.0)
            return
        for metric, value in learner.step(weight, self._limits.non_finite).items():
            book(totals, f"{metric}/{name}", value, 1.0)
        for metric, (total, share) in sums.sums[name].items():
            book(totals, metric, total, share)

    def _loss(
        self, objective: Objective, part: Part, said: TokenStatistics | Tensor
    ) -> tuple[Loss, Tensor | None]:
        if isinstance(said, Tensor):
            assert objective.critic_loss is not None, "critic samples need a critic loss"
            return objective.critic_loss(said, part.targets), None
        outputs = Outputs(said.logp_K, said.entropy_K if objective.entropy else None)
        gap_K = None
        if "behaviour" in part.targets.columns:
            gap_K = (said.logp_K.detach() - part.targets["behaviour"]).abs()[part.targets.mask_K.bool()]
        return objective.policy_loss(outputs, part.targets), gap_K

    def _bad_loss(self, learner: str) -> None:
        if self._limits.non_finite == "stop":
            raise NumericsError(
                f"The loss of '{learner}' is not finite at its update {self._learners[learner].steps}. Look at "
                "this step's rewards, lower `optimizer.lr`, or set `training.non_finite: skip`."
            )

    def _said(self, batch: Batch, entropy: Entropy) -> list[tuple[str, Part, TokenStatistics | Tensor]]:
        """Run one forward pass and return what each learner says of its targets."""
        home = self._homes[batch.owners[0][0]]
        route = [(self._homes[name].adapter, first, last) for name, first, last in batch.owners]
        with home.model.computing(route):
            hidden_ND = home.model.hidden(batch.tokens_N, batch.positions_N, batch.plan)
            hidden_KD = hidden_ND.index_select(0, batch.source_K)
            return [
                (
                    name,
                    part,
                    home.model.values(name, hidden_KD[part.first : part.last])
                    if self._homes[name].critic
                    else token_statistics(home.model, hidden_KD, batch, part, entropy),
                )
                for name, part in batch.parts.items()
            ]

    def _batches(self, samples: Sequence[Sample]) -> Iterator[tuple[list[int], Batch]]:
        """Pack samples base by base; each batch comes with the places of its base's samples."""
        bases: dict[int, list[int]] = {}
        for k, sample in enumerate(samples):
            bases.setdefault(id(self._homes[sample.learner].model), []).append(k)
        batches: list[tuple[list[int], Batch]] = []
        for chosen in bases.values():
            model = self._homes[samples[chosen[0]].learner].model
            for whole, room in passes(chosen, samples, self._limits.microbatch_tokens):
                own = [samples[k] for k in whole]
                packed = pack(own, room, model.device, share=model.flat is not None)
                batches.extend((whole, batch) for batch in packed)
        return breakable(batches)

    def _shuffle_seed(self, learner: str, epoch: int) -> int:
        return derive_seed(self._seed, learner, self._learners[learner].steps, epoch)

    def _models(self) -> list[LanguageModel]:
        return list({id(home.model): home.model for home in self._homes.values()}.values())

    def _drops_out(self) -> bool:
        return any(lora.dropout for model in self._models() for lora in model.bank.adapters.values())

    @contextmanager
    def _dropping_out(self) -> Iterator[None]:
        """Drop out in adapters, by this engine's seed and steps and not by what else the process has drawn.

        The base never does: that would train another distribution than the one that was sampled.
        """
        if not self._drops_out():
            yield
            return
        models = self._models()
        devices = {model.device.index or 0 for model in models if model.device.type == "cuda"}
        with torch.random.fork_rng(sorted(devices)):
            steps = [learner.steps for learner in self._learners.values()]
            torch.manual_seed(derive_seed(self._seed, "dropout", *steps))
            for model in models:
                model.bank.train(on=True)
            try:
                yield
            finally:
                for model in models:
                    model.bank.train(on=False)

    def publish(self) -> Mapping[str, Published]:
        """Return the weights of the policies that changed since the last call, with their version."""
        changed = {}
        for policy in self._policies:
            learner = self._learners.get(policy.name)
            if learner and learner.changed:
                learner.changed = False
                changed[policy.name] = Published(learner.parameters, learner.version)
        return changed

    def state(self) -> dict[str, object]:
        """Return everything that an exact resume needs, as a tree of tensors and plain values."""
        references = {
            name: {key: tensor.detach() for key, tensor in self.weights(name).items()}
            for name in self._homes
            if name.startswith(reference_name(""))
        }
        learners = {name: learner.state() for name, learner in self._learners.items()}
        return {"learners": learners, "references": references}

    def load_state(self, state: Mapping[str, object]) -> None:
        """Take what `state` returned, bit for bit."""
        for name, entry in cast("Mapping[str, Any]", state["learners"]).items():
            self._learners[name].load_state(entry)
        with torch.no_grad():
            for name, tensors in cast("Mapping[str, Any]", state["references"]).items():
                for key, tensor in self.weights(name).items():
                    tensor.copy_(tensors[key])
