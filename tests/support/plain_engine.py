"""A second train engine, as small as the protocol allows: plain autograd, a pass for each sample, plain gradient descent.

It learns in memory of its own, unlike `torch`: whatever reads weights elsewhere than through the protocol reads old ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, cast

import torch
from torch import Tensor

from kapelle.algorithm import Loss, Outputs, Targets
from kapelle.engines.rollout.protocol import WritingRenderer
from kapelle.engines.train.batch import bundles_of, minibatches
from kapelle.engines.train.protocol import HEAD, Objective, Published, TrainSetup
from kapelle.errors import CheckpointError, NumericsError, ParityError
from kapelle.models.fast.attention import plan_sequences
from kapelle.models.language_model import LanguageModel, copy_language_model
from kapelle.models.lora_bank import copy_weights
from kapelle.rows import Sample
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.base import Settings
from kapelle.team import embedder_name, reference_name

BOUND = 1e-4


class Plain(Settings):
    """Settings of the plain engine."""

    name: Literal["tests.support.plain_engine:Plain", "plain"] = "tests.support.plain_engine:Plain"

    def build(self, setup: TrainSetup) -> PlainEngine:
        return PlainEngine(setup)


class PlainEngine:
    """Policies and critics on copies of the models."""

    def __init__(self, setup: TrainSetup) -> None:
        self.setup = setup
        own, frozen = (
            {base: copy_language_model(model, base) for base, model in setup.models.items()} for _ in range(2)
        )
        self.homes: dict[str, tuple[LanguageModel, str | None]] = {}
        self.published = {p.name: 0 for p in setup.policies if p.trained and p.endpoint is None}
        self.changed = set(self.published)
        self.closed = False
        for policy in setup.policies:
            if policy.endpoint is None:
                for model in (own[policy.base], setup.models[policy.base]):
                    if policy.lora:
                        model.bank.add(
                            policy.name, policy.lora, derive_seed(setup.seed, "adapter", policy.name)
                        )
                self.homes[policy.name] = own[policy.base], policy.name if policy.lora else None
                self.homes[embedder_name(policy.name)] = frozen[policy.base], None
        self.rates = {policy.name: setup.optimizer_of(policy).lr for policy in setup.policies}
        self.rates |= {critic.name: setup.optimizer_of(critic).lr for critic in setup.critics}
        self.critics = {critic.name for critic in setup.critics}
        for critic in setup.critics:
            model = own[critic.base]
            assert critic.lora is not None, "this engine's critics are adapters"
            model.bank.add(critic.name, critic.lora, derive_seed(setup.seed, "adapter", critic.name))
            model.add_value_head(critic.name)
            self.homes[critic.name] = model, critic.name
        self.learners = [*self.published, *(c.name for c in setup.critics if c.trained)]
        if setup.references:
            self.refresh_references()

    @property
    def versions(self) -> Mapping[str, int]:
        return dict(self.published)

    def renderer(self, learner: str) -> WritingRenderer:
        return self.homes[learner][0].renderer

    def tensors(self, name: str) -> dict[str, Tensor]:
        model, adapter = self.homes[name]
        found = dict[str, Tensor](model.bank.parameters(adapter) if adapter else model.base_parameters())
        if name in self.critics:
            found |= {f"{HEAD}{key}": tensor for key, tensor in model.value_heads[name].named_parameters()}
        return found

    def weights(self, name: str) -> Mapping[str, Tensor]:
        return {key: tensor.detach() for key, tensor in self.tensors(name).items()}

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        copy_weights(self.tensors(name), weights, name)
        self.changed |= {name} & self.published.keys()

    def answer(self, sample: Sample) -> tuple[Tensor, Tensor | None]:
        """Return log-probs or values `_T`, and of policies the entropy."""
        model, adapter = self.homes[sample.learner]
        hidden_TD = self.hidden(sample, model, adapter)
        if sample.learner in self.critics:
            return model.values(sample.learner, hidden_TD), None
        logp_TV = (model.logits(hidden_TD) / sample.temperature).log_softmax(-1)
        token_T = torch.tensor([sample.tokens[t] for t in sample.targets])
        return logp_TV.gather(1, token_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)

    def hidden(self, sample: Sample, model: LanguageModel, adapter: str | None) -> Tensor:
        tokens_N = torch.tensor(sample.tokens[: sample.targets[-1]])
        count = len(tokens_N)
        with model.computing([(adapter, 0, count)]):
            hidden_ND = model.hidden(tokens_N, torch.arange(count), plan_sequences([count], model.device))
        return hidden_ND[[t - 1 for t in sample.targets]]

    @torch.no_grad()
    def score(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self.answer(sample)[0] for sample in samples]

    @torch.no_grad()
    def embed(self, samples: Sequence[Sample]) -> list[Tensor]:
        return [self.hidden(sample, self.homes[sample.learner][0], None).mean(0) for sample in samples]

    def check_parity(
        self, samples: Sequence[Sample], weights: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, float]:
        kept = {name: {k: t.clone() for k, t in self.weights(name).items()} for name in weights or {}}
        for name, others in (weights or {}).items():
            self.load_weights(name, others)
        try:
            return self.compared(samples)
        finally:
            for name, before in kept.items():
                self.load_weights(name, before)

    def compared(self, samples: Sequence[Sample]) -> dict[str, float]:
        own = [sample for sample in samples if "behaviour" in sample.columns]
        gaps = [s - sample.columns["behaviour"] for s, sample in zip(self.score(own), own, strict=True)]
        worst = float(torch.cat(gaps).abs().max())
        if not worst <= BOUND:
            raise ParityError(f"Trainer and sampler log-probs differ by {worst:.3g} nats (bound {BOUND}).")
        return {"parity/max": worst}

    def update(self, samples: Sequence[Sample], objective: Objective) -> dict[str, float]:
        row: dict[str, float] = {}
        if objective.parity and any("behaviour" in sample.columns for sample in samples):
            row = self.check_parity(samples)
        for epoch in range(objective.epochs):
            seeds = {name: derive_seed(0, name, epoch) for name in self.learners}
            for chosen in minibatches(samples, objective.minibatches, seeds):
                for name in self.learners:
                    own = [k for k in chosen if samples[k].learner == name]
                    if own:
                        row[f"loss/{name}"] = self.step(name, bundles_of(own, samples), samples, objective)
        return row

    def step(
        self, name: str, bundles: Sequence[Sequence[int]], samples: Sequence[Sample], objective: Objective
    ) -> float:
        total, weight = torch.zeros(()), 0.0
        tensors = self.tensors(name)
        for tensor in tensors.values():
            tensor.requires_grad_(True)
        for bundle in bundles:
            loss = self.loss([samples[k] for k in bundle], objective, critic=name in self.critics)
            total, weight = total + loss.total, weight + float(loss.weight)
        if not torch.isfinite(total):
            raise NumericsError(f"The loss of '{name}' is not finite.")
        grads = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
        with torch.no_grad():
            for tensor, grad in zip(tensors.values(), grads, strict=True):
                if grad is not None:
                    tensor.sub_(self.rates[name] * grad / weight)
        if name in self.published:
            self.published[name] += 1
            self.changed.add(name)
        return float(total.detach()) / weight

    def loss(self, bundle: Sequence[Sample], objective: Objective, *, critic: bool) -> Loss:
        answers = [self.answer(sample) for sample in bundle]
        counts = torch.tensor([len(sample.targets) for sample in bundle])
        targets = Targets(
            torch.arange(len(bundle)).repeat_interleave(counts),
            len(bundle),
            torch.cat([torch.ones(len(s.targets)) if s.mask is None else s.mask for s in bundle]),
            {name: torch.cat([s.columns[name] for s in bundle]) for name in bundle[0].columns},
        )
        said_K = torch.cat([said for said, _ in answers])
        if critic:
            assert objective.critic_loss is not None
            return objective.critic_loss(said_K, targets)
        entropy_K = torch.cat([entropy for _, entropy in answers if entropy is not None])
        return objective.policy_loss(Outputs(said_K, entropy_K if objective.entropy else None), targets)

    def publish(self) -> Mapping[str, Published]:
        changed, self.changed = self.changed, set()
        return {
            name: Published(deepcopy(dict(self.weights(name))), version)
            for name, version in self.published.items()
            if name in changed
        }

    def exchange(self, one: str, other: str) -> None:
        for ours, theirs in ((one, other), (reference_name(one), reference_name(other))):
            if ours in self.homes:
                held = deepcopy(dict(self.weights(ours)))
                copy_weights(self.tensors(ours), self.weights(theirs), ours)
                copy_weights(self.tensors(theirs), held, theirs)
        version = max(self.published[one], self.published[other]) + 1
        self.published[one] = self.published[other] = version
        self.changed |= {one, other}

    def refresh_references(self) -> None:
        for policy in self.published:
            model, adapter = self.homes[policy]
            name = reference_name(policy)
            if adapter is None:
                self.homes[name] = copy_language_model(model, name), None
            else:
                model.bank.copy(policy, name)
                self.homes[name] = model, name

    def state(self) -> dict[str, object]:
        named = [*self.learners, *(n for n in self.homes if n.startswith(reference_name("")))]
        return {"plain": {name: dict(self.weights(name)) for name in named}, "versions": dict(self.published)}

    def load_state(self, state: Mapping[str, object]) -> None:
        if "plain" not in state:
            raise CheckpointError("This state is of another train engine. Set `train_engine.name` as it was.")
        for name, weights in cast("Mapping[str, Any]", state["plain"]).items():
            copy_weights(self.tensors(name), weights, name)
        self.published = dict(cast("Mapping[str, int]", state["versions"]))
        self.changed = set(self.published)

    def close(self) -> None:
        self.closed = True
