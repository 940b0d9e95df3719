"""What learns: a set of weights with its optimiser, schedule and loss scale.

Clipping, normalisation and the step are each learner's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from kapelle.errors import CheckpointError, NumericsError
from kapelle.models.finite import poisoned
from kapelle.settings.schema import OptimizerConfig

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
            learned = {f"weights.{name}": local_part(p.detach()) for name, p in self.parameters.items()}
            for name, parameter in self.parameters.items():
                moments = self._optimizer.state.get(parameter, {})
                learned |= {
                    f"optimizer.{name}.{k}": local_part(v)
                    for k, v in moments.items()
                    if k != "step" and isinstance(v, Tensor)
                }
            wrong = agreed(poisoned(learned))
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
        names, moments = list(self.parameters), dict[int, dict[str, Any]]()
        for name, entry in state["optimizer"].items():
            # Copies; those of the weights' shape are laid out as the weights are.
            parameter, own = self.parameters[name], dict[str, Any]()
            for key, value in entry.items():
                own[key] = value.clone() if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    own[key] = distributed_like(own[key], parameter)
            moments[names.index(name)] = own
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": moments, "param_groups": groups})
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
