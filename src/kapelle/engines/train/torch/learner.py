"""A learner, which is a set of weights with its optimiser, learning rate schedule and loss scale.

Each learner has its own gradient clipping, normalisation and optimiser step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from kapelle.errors import CheckpointError, NumericsError
from kapelle.models.finite import poisoned, soundness
from kapelle.runtime.tensors import read_together
from kapelle.settings.schema import OptimizerConfig

Agreed = Callable[[str | None], str | None]
"""A function that receives the fault in this process (or None) and returns a fault of any process (or None)."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """An optimiser step that has been launched and whose results have not been read yet."""

    rate: float
    before: Mapping[str, Any] | None
    """A copy of the learner's state with which the step can be undone, or None if a faulty step stops the run."""
    unmoved: Sequence[nn.Parameter]
    """The parameters that had no optimiser moments before the step."""
    learned: Mapping[str, Tensor]
    """The weights and moments after the step, by name."""
    unread: Sequence[Tensor]
    """Scalars to read: the norm of the gradient, whether the norm is finite, and for each device whether the weights
    and moments are usable."""


class Learner:
    """A policy or critic with its AdamW optimiser (arXiv:1711.05101), in the variant that `optimizer.name` selects."""

    def __init__(
        self,
        name: str,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        lr: float,
        total_steps: int,
        scaled: bool,
        frozen: Collection[str] = (),
    ) -> None:
        """Create a learner for parameters, which become trainable except for the names in `frozen`.

        With `scaled`, fp16 loss scaling is used.
        """
        self.name = name
        self.parameters = dict(parameters)
        for key, parameter in self.parameters.items():
            parameter.requires_grad_(key not in frozen)
        self.steps = 0
        """The number of optimiser steps that these weights have taken."""
        self.version = 0
        """The number of changes of these weights. The number identifies a set of weights, even after an exchange."""
        self.changed = False
        """Whether the weights have changed since they were last published."""
        self._settings = settings
        self._lr = lr
        self._total_steps = total_steps
        self.device = next(iter(self.parameters.values())).device
        self._scale = LossScale() if scaled else None
        # Foreach operations need tensors of one kind: sharded tensors and whole ones (a critic's head) are separate groups.
        kinds = of_one_kind(self.parameters)
        self._names = [key for kind in kinds for key in kind]
        self.optimizer = build_optimizer([list(kind.values()) for kind in kinds], settings, lr)

    @property
    def bytes_to_come(self) -> int:
        """The number of bytes of gradients and moments that have not been allocated yet."""
        moments = 0 if self.optimizer.state else MOMENT_BYTES[self._settings.name]
        return sum(
            local_part(p).numel() * (moments + (4 if p.grad is None else 0)) for p in self.parameters.values()
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale of this learner, which is 1 except for fp16."""
        return loss if self._scale is None else loss * self._scale.scale

    def step(self, weight: float, on_bad: str, agreed: Agreed = lambda wrong: wrong) -> dict[str, float]:
        """Take an optimiser step of this learner only (see `take_steps`)."""
        return take_steps({self: weight}, on_bad, agreed)[0]

    def launch(self, weight: float, *, undoable: bool) -> LaunchedStep:
        """Launch an optimiser step and its checks without waiting for the results.

        If the gradient is not finite, the weights do not change.
        """
        # A step that breaks the weights is detected afterwards; this copy undoes it.
        before = _snapshot(self.state(parts=True)) if undoable else None
        rate = self._lr * rate_at(self.steps, self._total_steps, self._settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        pushed = [p for p in self.parameters.values() if p.grad is not None]
        # The gradient is a sum over all passes and processes, and `weight` is the learner's global weight.
        gradients = of_one_kind({str(k): p.grad for k, p in enumerate(pushed) if p.grad is not None})
        kinds = [[local_part(gradient) for gradient in kind.values()] for kind in gradients]
        for kind in kinds:
            if self._scale is not None:
                torch._foreach_mul_(kind, 1.0 / self._scale.scale)
            torch._foreach_div_(kind, weight)
        norm = _norm(gradients)
        if self._settings.max_grad_norm is not None:
            shrunk = (self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            for kind in kinds:  # shards may be in the host's memory while a head is on the device
                torch._foreach_mul_(kind, shrunk.to(kind[0].device))
        # All parts count together, so that all processes agree on whether the step is taken.
        finite = torch.isfinite(norm)
        unmoved = [p for p in pushed if p not in self.optimizer.state]
        self.version += 1  # until the step is settled, because an interruption here leaves changed weights
        if self._settings.name == "adamw":
            # The fused kernel reads this flag on the device; if it is set, the kernel changes nothing.
            stepping: Any = self.optimizer
            stepping.found_inf = finite.logical_not().float()
            stepping.step()
            del stepping.found_inf
        elif bool(finite):
            self.optimizer.step()
        learned = {f"weights.{name}": local_part(p.detach()) for name, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            moments = self.optimizer.state.get(parameter, {})
            learned |= {
                f"optimizer.{name}.{k}": local_part(v)
                for k, v in moments.items()
                if k != "step" and isinstance(v, Tensor)
            }
        return LaunchedStep(rate, before, unmoved, learned, [norm, finite, *soundness(learned)])

    def settle(
        self, step: LaunchedStep, read: Sequence[float], on_bad: str, agreed: Agreed
    ) -> dict[str, float]:
        """Finish a launched step, given the values of its `unread` scalars. The step is counted or undone, or NumericsError is raised."""
        norm, finite, sound = read[0], bool(read[1]), all(read[2:])
        undone = False
        self.version -= 1
        if self._scale is not None:
            self._scale.follow(finite=finite)
        if not finite:
            for parameter in step.unmoved:
                self.optimizer.state.pop(parameter, None)  # zeros from this step
            if on_bad == "stop" and self._scale is None:
                raise NumericsError(
                    f"The gradient of '{self.name}' is not finite at its update {self.steps}. Check this step's rewards, "
                    "lower `optimizer.lr`, or set `training.non_finite: skip`."
                )
        else:
            wrong = agreed(None if sound else poisoned(step.learned))
            if wrong is not None and step.before is None:
                raise NumericsError(
                    f"The update {self.steps} of '{self.name}' at a learning rate of {step.rate:g} broke its weights: "
                    f"{wrong}. No checkpoint contains these weights. Continue from the last one with a lower rate "
                    "(`kapelle train --resume RUN optimizer.lr=…`), skip such updates (`training.non_finite=skip`), or "
                    "return to an earlier checkpoint (`kapelle runs rollback RUN --to STEP`)."
                )
            undone = wrong is not None
        if undone and step.before is not None:
            self.load_state(step.before)
            finite = False
        self.steps += finite
        self.version += finite
        self.changed = self.changed or finite
        self.forget_gradient()
        size = {"grad_norm": norm} if finite else {}
        undo = {"undone": 1.0} if undone else {}
        return {**size, "lr": step.rate, "skipped": float(not finite), **undo}

    def forget_gradient(self) -> None:
        """Drop the gradient that was accumulated since the last step."""
        self.optimizer.zero_grad(set_to_none=True)

    def state(self, *, parts: bool = False) -> dict[str, Any]:
        """Return weights, optimiser state and counters as a tree. With `parts`, sharded tensors stay sharded."""
        moments = self.optimizer.state_dict()["state"]
        names = self._names

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
            "scaler": {} if self._scale is None else self._scale.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state` exactly. Raises CheckpointError if the state comes from another optimiser."""
        for entry in state["optimizer"].values():
            if ("exp_avg" in entry) != (self._settings.name == "adamw"):
                raise CheckpointError(
                    f"The optimiser's state of '{self.name}' ({', '.join(sorted(entry))}) does not belong to "
                    f"`optimizer.name: {self._settings.name}`. Set `optimizer.name` to the value used when the "
                    "checkpoint was written."
                )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(distributed_like(state["weights"][name], parameter))
        names, moments = self._names, dict[int, dict[str, Any]]()
        for name, entry in state["optimizer"].items():
            # Copy the tensors; those with a weight's shape are sharded like the weight.
            parameter, own = self.parameters[name], dict[str, Any]()
            for key, value in entry.items():
                own[key] = value.clone() if isinstance(value, Tensor) else value
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    own[key] = distributed_like(own[key], parameter)
            moments[names.index(name)] = own
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": moments, "param_groups": groups})
        self.steps = int(state["steps"])
        self.version = int(state["version"])
        if self._scale is not None:
            self._scale.load_state(state["scaler"])

    def replaced(self) -> None:
        """Record that the weights were replaced from outside."""
        self.changed = True
        self.version += self.version > 0  # samplers always reload version 0

    def exchange(self, other: Learner) -> None:
        """Swap weights, optimiser state, counters and loss scale with another learner of the same shape."""
        own_state, other_state = deepcopy(self.state()), deepcopy(other.state())
        version = max(self.version, other.version) + 1
        for learner, state in ((self, other_state), (other, own_state)):
            learner.load_state(state)
            learner.version = version
            learner.changed = True


class LossScale:
    """The factor on a learner's loss that keeps small gradients above the smallest float16 number (arXiv:1710.03740).

    The factor is halved after a step that was skipped because its gradient is not finite, and doubled after 2000
    consecutive finite steps.
    """

    FIRST, GROWS_AFTER = 65536.0, 2000

    def __init__(self) -> None:
        """Create a loss scale with the initial value 65536."""
        self.scale = self.FIRST
        self._sound_steps = 0

    def follow(self, *, finite: bool) -> None:
        """Update the loss scale after a step."""
        self._sound_steps = self._sound_steps + 1 if finite else 0
        if not finite:
            self.scale /= 2
        elif self._sound_steps == self.GROWS_AFTER:
            self.scale, self._sound_steps = self.scale * 2, 0

    def state(self) -> dict[str, float | int]:
        """Return the state under the names of `torch.amp.GradScaler`, so that checkpoints are interchangeable in both directions."""
        return {
            "scale": self.scale,
            "growth_factor": 2.0,
            "backoff_factor": 0.5,
            "growth_interval": self.GROWS_AFTER,
            "_growth_tracker": self._sound_steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.scale, self._sound_steps = float(state["scale"]), int(state["_growth_tracker"])


Kind = TypeVar("Kind", bound=Tensor)


def of_one_kind(tensors: Mapping[str, Kind]) -> list[dict[str, Kind]]:
    """Group tensors by kind: whole tensors form one group, and sharded tensors form one group for each mesh of processes."""
    kinds: dict[object, dict[str, Kind]] = {}
    for key, tensor in tensors.items():
        kinds.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, {})[key] = tensor
    return list(kinds.values())


def _norm(gradients: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """Return the global norm of gradients of all kinds, which may be sharded. The norm is the same in all processes."""
    norms = [gathered(nn.utils.get_total_norm(list(kind.values()))) for kind in gradients]
    if not norms:
        return torch.tensor(0.0)
    here = [norm.to(norms[0].device) for norm in norms]
    together: Tensor = torch.linalg.vector_norm(torch.stack(here)) if len(here) > 1 else here[0]
    return together


def take_steps(
    weights: Mapping[Learner, float], on_bad: str, agreed: Agreed = lambda wrong: wrong
) -> list[dict[str, float]]:
    """Divide each learner's accumulated gradient by its weight, clip it and take a step, and return norms and learning rates.

    The results are in the order of the learners. All steps are launched before any result is read, so that there is
    only one wait for a GPU. Every learner is settled before the first fault is raised, so that the counters and weights
    of all learners are consistent.

    A gradient that is not finite raises NumericsError or, if `on_bad` is "skip", leaves the weights unchanged. Learners
    with fp16 loss scaling always skip such steps, because the loss scale adapts in this way. A step that breaks the
    weights or the optimiser's moments is handled in the same way. With "skip", such a step is undone (weights, moments
    and counters) and is also counted as `undone`; for this purpose, a copy of the state is kept during the step. If
    processes hold shards of the weights, `agreed` shares a fault of one process with all processes.
    """
    undoable = on_bad == "skip"
    rows: list[dict[str, float]] = []
    faults: list[NumericsError] = []
    for together in [[learner] for learner in weights] if undoable else [list(weights)]:
        steps = [learner.launch(weights[learner], undoable=undoable) for learner in together]
        numbers = map(float, read_together([number for step in steps for number in step.unread]))
        for learner, step in zip(together, steps, strict=True):
            try:
                rows.append(learner.settle(step, list(islice(numbers, len(step.unread))), on_bad, agreed))
            except NumericsError as fault:
                faults.append(fault)
    if faults:
        raise faults[0]
    return rows


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

    The factor rises linearly from 0 over `warmup_steps`, as in the schedules of transformers, so the first step changes
    nothing. After the warm-up, the factor stays constant (`constant`) or falls to 0 at step `total`, linearly
    (`linear`) or along a half cosine (`cosine`, arXiv:1608.03983 without restarts).
    """
    if step < settings.warmup_steps:
        return step / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - settings.warmup_steps) / max(1, total - settings.warmup_steps))
    return 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


OF_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
"""Mapping from `optimizer.name` to a class of `bitsandbytes.optim` with one-byte moments (arXiv:2110.02861). The
moments of the paged variant can be moved to the host's memory."""


MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2}
"""The number of bytes of both moments per weight, by `optimizer.name`."""


def build_optimizer(
    groups: Sequence[Sequence[nn.Parameter]], settings: OptimizerConfig, lr: float
) -> torch.optim.Optimizer:
    """Return the AdamW optimiser of torch or bitsandbytes for groups of parameters.

    The module `setup` has already checked that the library is installed.
    """
    given: dict[str, Any] = {
        "lr": lr,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW([{"params": list(group)} for group in groups], **given, fused=True)
    import bitsandbytes

    made: torch.optim.Optimizer = getattr(bitsandbytes.optim, OF_BITSANDBYTES[settings.name])(
        [{"params": list(group)} for group in groups], **given
    )
    return made


# If processes shard a base (engines/train/fsdp.py), its weights are `DTensor`s.


def gathered(value: Any) -> Any:
    """Gather a sharded tensor from all processes, which must all call this function. Any other value is returned unchanged."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_part(value: Tensor) -> Tensor:
    """Return this process's shard of a tensor, or the tensor itself if it is not sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


def distributed_like(tensor: Tensor, pattern: Tensor) -> Tensor:
    """Shard a whole tensor like another tensor of the same shape. A tensor that is already sharded is returned unchanged."""
    if not isinstance(pattern, DTensor) or isinstance(tensor, DTensor):
        return tensor
    on_device = tensor.to(device=pattern.device, dtype=pattern.dtype)
    laid_out = distribute_tensor(on_device, pattern.device_mesh, pattern.placements, src_data_rank=None)
    return laid_out.to(
        pattern.device
    )  # shards may be in the host's memory although the mesh consists of devices
