"""What learns: sets of weights, each with its optimiser, schedule and loss scale, and the models and adapters they are on.

Learners share nothing. Clipping, normalisation and the step are each learner's own, so a joint update equals training
every learner alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from kapelle.engines.train.batch import Batch, token_keys
from kapelle.engines.train.protocol import HEAD, TrainSetup
from kapelle.errors import CheckpointError, ModelError, NumericsError
from kapelle.models.finite import poisoned
from kapelle.models.language_model import LanguageModel, copy_language_model
from kapelle.models.weights import copy_weights
from kapelle.runtime.randomness import derive_seed
from kapelle.settings.schema import OptimizerConfig
from kapelle.team import Critic, Lora, Policy, embedder_name, reference_name

Agreed = Callable[[str | None], str | None]
"""Takes what is wrong in this process, and returns what is wrong in some process."""


class Learner:
    """A policy or critic with its AdamW (1711.05101), in the form that `optimizer.name` says."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        lr: float,
        total_steps: int,
        scaled: bool,
    ) -> None:
        """Take parameters (they become trainable); `scaled` turns fp16 loss scaling on."""
        self.name = name
        self.parameters = dict(parameters)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.steps = 0
        """Optimiser steps taken by these weights."""
        self.version = 0
        """Number of changes of these weights; no two sets of weights have the same number, also after an exchange."""
        self.changed = False
        """True if the weights changed since they were last published."""
        self._settings = settings
        self._lr = lr
        self._total_steps = total_steps
        device = next(iter(self.parameters.values())).device.type
        self._scaler = torch.amp.GradScaler(device, enabled=scaled)
        self._optimizer = build_optimizer(list(self.parameters.values()), settings, lr)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times this learner's loss scale (1 but for fp16)."""
        return self._scaler.scale(loss)

    def step(self, weight: float, on_bad: str, agreed: Agreed = lambda wrong: wrong) -> dict[str, float]:
        """Divide the accumulated gradient of sums by `weight`, clip it, step; return norm and rate.

        A gradient that is not finite raises NumericsError, or leaves the weights as they are when `on_bad`
        is "skip" (fp16 always skips: its scale adapts that way). So does a step that itself breaks the weights or the
        optimiser's moments; under "skip" it is undone (weights, moments and counters) and counts as `undone` too. For
        this "skip" keeps a copy of them during the step. Where processes hold parts of the weights, `agreed` makes what
        is wrong with the part of one known to all.
        """
        # A step that breaks the weights is noticed after it was taken: `skip` then returns to this copy.
        before = _snapshot(self.state(parts=True)) if on_bad == "skip" else None
        rate = self._lr * rate_at(self.steps, self._total_steps, self._settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        # What was accumulated is a sum over all passes and processes, and `weight` is the learner's in all of them.
        torch._foreach_div_(grads, weight)
        bound = self._settings.max_grad_norm
        norm = gathered(
            nn.utils.clip_grad_norm_(list(self.parameters.values()), math.inf if bound is None else bound)
        )
        finite = bool(torch.isfinite(norm))
        if not finite and on_bad == "stop" and not self._scaler.is_enabled():
            raise NumericsError(
                f"The gradient of '{self.name}' is not finite at its update {self.steps}. Look at this "
                "step's rewards, lower `optimizer.lr`, or set `training.non_finite: skip`."
            )
        undone = False
        if finite or self._scaler.is_enabled():
            self._scaler.step(self._optimizer)
            wrong = agreed(self._poison())
            if wrong is not None and before is None:
                raise NumericsError(
                    f"The update {self.steps} of '{self.name}' at a rate of {rate:g} broke its weights: {wrong}. No "
                    "checkpoint holds them. Continue from the last one with a lower rate (`kapelle train --resume RUN "
                    "optimizer.lr=…`), leave such updates out (`training.non_finite=skip`), or go further back "
                    "(`kapelle runs rollback RUN --to STEP`)."
                )
            undone = wrong is not None
        self._scaler.update()
        if undone and before is not None:
            self.load_state(before)
            finite = False
        self.steps += finite
        self.version += finite
        self.changed = self.changed or finite
        self.forget_gradient()
        size = {"grad_norm": float(norm)} if finite else {}
        undo = {"undone": 1.0} if undone else {}
        return {**size, "lr": rate, "skipped": float(not finite), **undo}

    def _poison(self) -> str | None:
        tensors = {
            f"weights.{name}": local_part(parameter.detach()) for name, parameter in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            tensors |= {
                f"optimizer.{name}.{k}": local_part(v)
                for k, v in moments.items()
                if k != "step" and isinstance(v, Tensor)
            }
        return poisoned(tensors)

    def forget_gradient(self) -> None:
        """Drop what was accumulated since the last step."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self, *, parts: bool = False) -> dict[str, Any]:
        """Return weights, optimiser state and counters as a tree; with `parts`, what is shared out stays so."""
        moments = self._optimizer.state_dict()["state"]
        names = list(self.parameters)

        def read(value: Any) -> Any:
            return value if parts else gathered(value)

        return {
            "weights": {name: read(parameter.detach()) for name, parameter in self.parameters.items()},
            "optimizer": {
                names[index]: {key: read(value) for key, value in entry.items()}
                for index, entry in moments.items()
            },
            "steps": self.steps,
            "version": self.version,
            "scaler": self._scaler.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, bit for bit; CheckpointError when another optimiser returned it."""
        for entry in state["optimizer"].values():
            if ("exp_avg" in entry) != (self._settings.name == "adamw"):
                raise CheckpointError(
                    f"The optimiser's state of '{self.name}' ({', '.join(sorted(entry))}) is not that of `optimizer.name: "
                    f"{self._settings.name}`. Set `optimizer.name` as it was when the checkpoint was written."
                )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(distributed_like(state["weights"][name], parameter))
        names = list(self.parameters)
        moments: Mapping[str, Mapping[str, Any]] = state["optimizer"]
        self._optimizer.load_state_dict(
            {
                "state": {
                    names.index(name): _copied(entry, self.parameters[name])
                    for name, entry in moments.items()
                },
                "param_groups": self._optimizer.state_dict()["param_groups"],
            }
        )
        self.steps = int(state["steps"])
        self.version = int(state["version"])
        if self._scaler.is_enabled():
            self._scaler.load_state_dict(dict(state["scaler"]))

    def exchange(self, other: Learner) -> None:
        """Swap weights, optimiser state, counters and loss scale with a learner of the same shape."""
        own_state, other_state = deepcopy(self.state()), deepcopy(other.state())
        version = max(self.version, other.version) + 1
        for learner, state in ((self, other_state), (other, own_state)):
            learner.load_state(state)
            learner.version = version
            learner.changed = True


def _snapshot(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tree of tensors."""
    copies: dict[str, Any] = {}
    for key, value in tree.items():
        copies[key] = _snapshot(value) if isinstance(value, Mapping) else value
        if isinstance(value, Tensor):
            copies[key] = value.clone()
    return copies


def _copied(entry: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Return copies of an optimiser's values of a parameter; those of its shape are laid out as it is."""
    copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in entry.items()}
    return {
        key: distributed_like(value, parameter)
        if isinstance(value, Tensor) and value.shape == parameter.shape
        else value
        for key, value in copies.items()
    }


def rate_at(step: int, total: int, settings: OptimizerConfig) -> float:
    """Return the factor on the learning rate at an optimiser step, counted from 0.

    It rises linearly over `warmup_steps`, then stays (`constant`) or falls to 0 at `total`, linearly
    (`linear`) or by a half cosine (`cosine`, 1608.03983 without restarts).
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    return 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


OF_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
"""Classes of `bitsandbytes.optim` by name: moments of one byte (2110.02861), and paged ones, which may lie in the machine's memory."""


def build_optimizer(
    parameters: Sequence[nn.Parameter], settings: OptimizerConfig, lr: float
) -> torch.optim.Optimizer:
    """Return AdamW in torch's or another library's form; `setup` has checked that the library is there."""
    given: dict[str, Any] = {
        "lr": lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(list(parameters), **given, fused=True)
    import bitsandbytes

    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, OF_BITSANDBYTES[settings.name])(
        list(parameters), **given
    )
    return made


# Where processes shard a base (engines/train/fsdp.py), its weights are `DTensor`s: each process holds a part.


def gathered(value: Any) -> Any:
    """Return a value itself, or gather a tensor from all processes, which must all ask for it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_part(value: Tensor) -> Tensor:
    """Return a tensor itself, or the part of it that this process holds."""
    return value.to_local() if isinstance(value, DTensor) else value


def distributed_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Return a whole tensor, which all processes hold, laid out as another of its shape is; one that already is, itself."""
    if not isinstance(pattern, DTensor) or isinstance(tensor, DTensor):
        return tensor
    on_device = tensor.to(device=pattern.device, dtype=pattern.dtype)
    return distribute_tensor(on_device, pattern.device_mesh, pattern.placements, src_data_rank=None)


@dataclass(slots=True)
class Placement:
    """The model and adapter of a learner, reference or embedder."""

    model: LanguageModel
    adapter: str | None
    critic: bool = False


class LearnerBank:
    """Policies and critics on models in this process's memory, with their frozen references and embedders."""

    def __init__(self, setup: TrainSetup) -> None:
        """Add adapters and heads to the models and make one learner for each policy and critic that is trained."""
        self._setup = setup
        self.placements: dict[str, Placement] = {}
        self.by_name: dict[str, Learner] = {}
        """Trained policies, then trained critics."""
        self._policies = [policy for policy in setup.policies if policy.endpoint is None]
        for policy in self._policies:
            model = setup.models[policy.base]
            if policy.lora:
                self._add_adapter(model, policy.name, policy.lora)
            self.placements[policy.name] = Placement(model, policy.name if policy.lora else None)
            if policy.trained:
                self._add_learner(policy)
        for critic in setup.critics:
            model = setup.models[critic.base]
            self._add_adapter(model, critic.name, critic.lora)
            if critic.name not in model.value_heads:
                model.add_value_head(critic.name)
            self.placements[critic.name] = Placement(model, critic.name, critic=True)
            if critic.trained:
                self._add_learner(critic)
        if setup.references:
            self.refresh_references()
        copies: dict[int, LanguageModel] = {}
        for policy in self._policies if setup.embedders else ():
            # Each policy's base as it is now: the base under its adapter, or a copy of a base that is trained.
            model = self.placements[policy.name].model
            if policy.trained and policy.lora is None:
                model = copies.setdefault(id(model), copy_language_model(model, embedder_name(policy.name)))
            self.placements[embedder_name(policy.name)] = Placement(model, None)

    @property
    def policies(self) -> Mapping[str, Learner]:
        """The policies that learn."""
        return {policy.name: self.by_name[policy.name] for policy in self._policies if policy.trained}

    @property
    def models(self) -> list[LanguageModel]:
        """Every model in use, once."""
        return list({id(placement.model): placement.model for placement in self.placements.values()}.values())

    def _add_adapter(self, model: LanguageModel, name: str, lora: Lora) -> None:
        """Add an adapter, or continue with the one that an earlier engine left on a model in memory."""
        existing = model.bank.adapters.get(name)
        if existing is None:
            model.bank.add(name, lora, derive_seed(self._setup.seed, "adapter", name))
        elif existing != lora:
            raise ModelError(
                f"Model '{model.name}' carries an adapter '{name}' from before, made with other `lora` settings. "
                "Load the model anew, or set `lora` as it was."
            )

    def _add_learner(self, learner: Policy | Critic) -> None:
        setup, name = self._setup, learner.name
        settings, scaled = setup.optimizer_of(learner), self.placements[name].model.dtype == torch.float16
        parameters = cast("Mapping[str, torch.nn.Parameter]", self._tensors(name))
        narrow = next((key for key, p in parameters.items() if p.dtype != torch.float32), None)
        if narrow is not None:
            raise ModelError(
                f"'{name}' trains all weights of '{self.placements[name].model.name}', but '{narrow}' is held in "
                f"{str(parameters[narrow].dtype).removeprefix('torch.')}: small steps would be lost to rounding. Pass the model "
                "with its weights in float32, or train an adapter (`weights: lora`)."
            )
        self.by_name[name] = Learner(
            name, parameters, settings, settings.lr, setup.limits.total_steps, scaled
        )

    def _tensors(self, name: str) -> dict[str, Tensor]:
        placement = self.placements[name]
        found = (
            placement.model.bank.parameters(placement.adapter)
            if placement.adapter
            else placement.model.base_parameters()
        )
        if not placement.critic:
            return dict(found)
        head = placement.model.value_heads[name].named_parameters()
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
    def temporary_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> Iterator[None]:
        """Put other weights, by policy and name, in the place of the current ones inside the block."""
        previous: list[tuple[Tensor, Tensor]] = []
        try:
            with torch.no_grad():
                for name, others in weights.items():
                    own = self.weights(name)
                    previous += [(tensor, tensor.detach().clone()) for tensor in own.values()]
                    copy_weights(own, others, f"'{name}'")
            yield
        finally:
            with torch.no_grad():
                for tensor, before in previous:
                    tensor.copy_(before)

    def refresh_references(self) -> None:
        """Make every reference policy a frozen copy of its trained policy as it is now."""
        for policy in self._policies:
            if not policy.trained:
                continue
            model, name = self.placements[policy.name].model, reference_name(policy.name)
            if policy.lora:
                model.bank.copy(policy.name, name)
                self.placements[name] = Placement(model, name)
            else:
                self.placements[name] = Placement(copy_language_model(model, name), None)

    def exchange(self, one: str, other: str) -> None:
        """Swap two policies: weights, optimiser state and references, bit for bit."""
        self.by_name[one].exchange(self.by_name[other])
        reference, other_reference = reference_name(one), reference_name(other)
        if reference not in self.placements:
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
            for name in self.placements
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
