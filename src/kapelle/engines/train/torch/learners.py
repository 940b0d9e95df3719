"""The models and adapters of learners, references and embedders, and their weights by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kapelle.engines.train.batch import Batch
from kapelle.engines.train.dropout_keys import token_keys
from kapelle.engines.train.protocol import HEAD, TrainSetup
from kapelle.engines.train.torch.learner import Learner
from kapelle.errors import CheckpointError, ModelError
from kapelle.models.language_model import LanguageModel, copy_language_model
from kapelle.models.weights import copy_weights
from kapelle.runtime.seeds import derive_seed
from kapelle.team import Critic, Lora, Policy, embedder_name, reference_name


@dataclass(slots=True)
class Home:
    """The model and adapter of a learner, reference or embedder."""

    model: LanguageModel
    adapter: str | None
    critic: bool = False


class Learners:
    """Policies and critics on models in this process's memory, with their frozen references and embedders."""

    def __init__(self, setup: TrainSetup) -> None:
        """Add adapters and heads to the models and make one learner for each policy and critic that is trained."""
        self._setup = setup
        self.homes: dict[str, Home] = {}
        self.by_name: dict[str, Learner] = {}
        """Trained policies, then trained critics."""
        self._policies = [policy for policy in setup.policies if policy.endpoint is None]
        for policy in self._policies:
            model = setup.models[policy.base]
            if policy.lora:
                self._adapt(model, policy.name, policy.lora)
            self.homes[policy.name] = Home(model, policy.name if policy.lora else None)
            if policy.trained:
                self._learn(policy)
        for critic in setup.critics:
            self._add_critic(critic)
        if setup.references:
            self.refresh_references()
        if setup.embedders:
            self._add_embedders()

    @property
    def policies(self) -> Mapping[str, Learner]:
        """The policies that learn."""
        return {policy.name: self.by_name[policy.name] for policy in self._policies if policy.trained}

    @property
    def models(self) -> list[LanguageModel]:
        """Every model in use, once."""
        return list({id(home.model): home.model for home in self.homes.values()}.values())

    def _add_critic(self, critic: Critic) -> None:
        model = self._setup.models[critic.base]
        self._adapt(model, critic.name, critic.lora)
        if critic.name not in model.value_heads:
            model.add_value_head(critic.name)
        self.homes[critic.name] = Home(model, critic.name, critic=True)
        if critic.trained:
            self._learn(critic)

    def _adapt(self, model: LanguageModel, name: str, lora: Lora) -> None:
        """Add an adapter, or continue with the one that an earlier engine left on a model in memory."""
        held = model.bank.adapters.get(name)
        if held is None:
            model.bank.add(name, lora, derive_seed(self._setup.seed, "adapter", name))
        elif held != lora:
            raise ModelError(
                f"Model '{model.name}' carries an adapter '{name}' from before, made with other `lora` settings. "
                "Load the model anew, or set `lora` as it was."
            )

    def _learn(self, learner: Policy | Critic) -> None:
        setup, name = self._setup, learner.name
        settings, scaled = setup.optimizer_of(learner), self.homes[name].model.dtype == torch.float16
        parameters = cast("Mapping[str, torch.nn.Parameter]", self._tensors(name))
        narrow = next((key for key, p in parameters.items() if p.dtype != torch.float32), None)
        if narrow is not None:
            raise ModelError(
                f"'{name}' trains all weights of '{self.homes[name].model.name}', but '{narrow}' is held in "
                f"{str(parameters[narrow].dtype).removeprefix('torch.')}: small steps would be lost to rounding. Pass the model "
                "with its weights in float32, or train an adapter (`weights: lora`)."
            )
        self.by_name[name] = Learner(
            name, parameters, settings, settings.lr, setup.limits.total_steps, scaled
        )

    def _tensors(self, name: str) -> dict[str, Tensor]:
        home = self.homes[name]
        found = home.model.bank.parameters(home.adapter) if home.adapter else home.model.base_parameters()
        if not home.critic:
            return dict(found)
        head = home.model.value_heads[name].named_parameters()
        return {**found, **{f"{HEAD}{key}": tensor for key, tensor in head}}

    def weights(self, name: str) -> Mapping[str, Tensor]:
        """Return the weights of a policy, critic or reference by name; the tensors themselves, not copies."""
        return self.by_name[name].parameters if name in self.by_name else self._tensors(name)

    def load_weights(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Set weights; see the protocol."""
        copy_weights(self.weights(name), weights, f"'{name}'")
        if name in self.by_name:
            self.by_name[name].changed = True

    @contextmanager
    def standing_in(self, weights: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
        """Put other weights, by policy and name, in the place of the current ones inside the block."""
        kept: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for name, others in weights.items():
                    own = self.weights(name)
                    kept += [(tensor, tensor.detach().clone()) for tensor in own.values()]
                    copy_weights(own, others, f"'{name}'")
            yield
        finally:
            with torch.no_grad():
                for tensor, before in kept:
                    tensor.copy_(before)

    def _add_embedders(self) -> None:
        """Keep each policy's base as it is now: the base under its adapter, or a copy of a base that is trained."""
        copies: dict[int, LanguageModel] = {}
        for policy in self._policies:
            model = self.homes[policy.name].model
            if policy.trained and policy.lora is None:
                model = copies.setdefault(id(model), copy_language_model(model, embedder_name(policy.name)))
            self.homes[embedder_name(policy.name)] = Home(model, None)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its trained policy as it is now."""
        for policy in self._policies:
            if not policy.trained:
                continue
            model, name = self.homes[policy.name].model, reference_name(policy.name)
            if policy.lora:
                model.bank.copy(policy.name, name)
                self.homes[name] = Home(model, name)
            else:
                self.homes[name] = Home(copy_language_model(model, name), None)

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bit for bit."""
        self.by_name[one].exchange(self.by_name[other])
        reference, other_reference = reference_name(one), reference_name(other)
        if reference not in self.homes:
            return
        with torch.no_grad():
            pairs = zip(self.weights(reference).values(), self.weights(other_reference).values(), strict=True)
            for first, second in pairs:
                copy = first.clone()
                first.copy_(second)
                second.copy_(copy)

    def has_dropout(self) -> bool:
        """Return whether any adapter has dropout."""
        return any(lora.dropout for model in self.models for lora in model.bank.adapters.values())

    @contextmanager
    def dropout(self) -> Iterator[Callable[[Batch], Tensor | None]]:
        """Turn the adapters' dropout on; yield what gives a batch's keys, by which it is drawn.

        A mask depends on the run's seed, the learner's steps and the tokens up to its own, so that it is the same in any split
        of a step's samples. The base has none: that would train another distribution than the one that was sampled.
        """
        if not self.has_dropout():
            yield lambda _: None
            return
        seeds = {
            name: derive_seed(self._setup.seed, "dropout", name, learner.steps)
            for name, learner in self.by_name.items()
        }
        for model in self.models:
            model.bank.train(on=True)
        try:
            yield lambda batch: token_keys(batch, seeds)
        finally:
            for model in self.models:
                model.bank.train(on=False)

    def state(self, *, parts: bool = False) -> dict[str, object]:
        """Return everything that an exact resume needs, as a tree of tensors and plain values; see `Learner.state`."""
        references = {
            name: {key: tensor.detach() for key, tensor in self.weights(name).items()}
            for name in self.homes
            if name.startswith(reference_name(""))
        }
        return {
            "learners": {name: learner.state(parts=parts) for name, learner in self.by_name.items()},
            "references": references,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, bit for bit."""
        if not {"learners", "references"} <= state.keys():
            raise CheckpointError(
                f"The state holds {sorted(state)}, not what the train engine `torch` saves. Set `train_engine.name` as it "
                "was when the checkpoint was written."
            )
        for name, entry in state["learners"].items():
            self.by_name[name].load_state(entry)
            self.by_name[name].changed = True
        with torch.no_grad():
            for name, tensors in state["references"].items():
                for key, tensor in self.weights(name).items():
                    tensor.copy_(tensors[key])
