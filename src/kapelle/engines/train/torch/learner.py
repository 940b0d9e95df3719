"""One set of weights that learns: its parameters, optimiser, schedule and loss scale.

Learners share nothing here. Clipping, normalisation and the step are each learner's own, so a
joint update equals training every learner alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from kapelle.engines.train.torch.optimizers import build_optimizer, check_kind
from kapelle.engines.train.torch.placement import laid_like, own_part, whole
from kapelle.errors import NumericsError
from kapelle.models.finite import poisoned
from kapelle.settings.schema import OptimizerConfig

Agreed = Callable[[str | None], str | None]
"""Takes what is wrong in this process, and returns what is wrong in some process."""


def _alone(wrong: str | None) -> str | None:
    return wrong


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

    def step(self, weight: float, on_bad: str, agreed: Agreed = _alone) -> dict[str, float]:
        """Divide the accumulated gradient of sums by `weight`, clip it, step; return norm and rate.

        A gradient that is not finite raises NumericsError, or leaves the weights as they are when `on_bad`
        is "skip" (fp16 always skips: its scale adapts that way). So does a step that itself breaks the weights or the
        optimiser's moments; under "skip" it is undone (weights, moments and counters) and counts as `undone` too. For
        this "skip" keeps a copy of them during the step. Where processes hold parts of the weights, `agreed` makes what
        is wrong with the part of one known to all.
        """
        before = _snapshot(self.state(parts=True)) if on_bad == "skip" else None
        rate = self._lr * rate_at(self.steps, self._total_steps, self._settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._scaler.unscale_(self._optimizer)
        grads = [p.grad for p in self.parameters.values() if p.grad is not None]
        torch._foreach_div_(grads, weight)
        bound = self._settings.max_grad_norm
        norm = whole(
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
            f"weights.{name}": own_part(parameter.detach()) for name, parameter in self.parameters.items()
        }
        for name, parameter in self.parameters.items():
            moments = self._optimizer.state.get(parameter, {})
            tensors |= {
                f"optimizer.{name}.{k}": own_part(v)
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
        held = _as_it_is if parts else whole
        return {
            "weights": {name: held(parameter.detach()) for name, parameter in self.parameters.items()},
            "optimizer": {
                names[index]: {key: held(value) for key, value in entry.items()}
                for index, entry in moments.items()
            },
            "steps": self.steps,
            "version": self.version,
            "scaler": self._scaler.state_dict(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, bit for bit; CheckpointError when another optimiser returned it."""
        check_kind(self.name, self._settings, state["optimizer"].values())
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(laid_like(state["weights"][name], parameter))
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


def _as_it_is(value: Any) -> Any:
    return value


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
        key: laid_like(value, parameter)
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
