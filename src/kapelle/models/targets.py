"""Which layers of a model an adapter goes on: `all-linear`, or the names that a user gives.

`all-linear` takes every linear layer of the decoder's blocks, fused ones (`qkv_proj`, `c_attn`) and GPT-2's `Conv1D`
included. It leaves out, by what they are and not by a list of models:

- the output head, embeddings, and what stands beside the blocks;
- routers of a mixture of experts, and gates with a single output: adapters would move which expert is chosen;
- experts: each reads tokens that its router chose, and the bank sends rows to adapters. Most are no linear layers in
  `transformers` anyway, but one tensor for all experts;
- in a model with experts, other layers that are named like the parts of one (a shared expert's `down_proj`): PEFT would
  take these names for the experts when it loads the adapter;
- of a state-space mixer (Mamba) everything but `in_proj`: its scan may read the other weights past their layers, and
  PEFT refuses `out_proj`.

A name reaches what `all-linear` leaves out where an adapter there computes the right thing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from torch import nn

from kapelle.errors import ModelError, did_you_mean
from kapelle.models.banked_linear import BankedLinear, features_of, is_linear
from kapelle.team import ALL_LINEAR, Lora

if TYPE_CHECKING:
    from kapelle.models.banked_linear import Plain

ROUTERS = frozenset({"router", "gate", "shared_expert_gate"})
"""Names of the layers that choose or weigh experts, or of what holds them."""

EXPERT_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
"""Names that the parts of an expert have or once had."""


def linear_layers(model: nn.Module) -> dict[str, Plain]:
    """Return the layers that can have an adapter, by their path in the bare model."""
    head = _output_head(model)
    return {
        path: cast("Plain", module)
        for path, module in _bare_modules(model)
        if is_linear(module) and module is not head and _refusal(model, path) is None
    }


def adapted_layers(model: nn.Module, targets: Sequence[str]) -> list[str]:
    """Return the paths of the layers that targets name, in the model's order.

    Raises ModelError when a target names none, or one that cannot have an adapter.
    """
    layers = linear_layers(model)
    chosen = set(_all_linear(model, layers)) if ALL_LINEAR in targets else set()
    if ALL_LINEAR in targets and not chosen:
        raise ModelError(f"`{ALL_LINEAR}` finds no linear layer in the blocks of {type(model).__name__}.")
    for target in targets:
        found = [path for path in layers if _ends(path, target)]
        if target != ALL_LINEAR and not found:
            raise ModelError(_no_such_layer(model, target, layers))
        chosen.update(found)
    return [path for path in layers if path in chosen]


def named(model: nn.Module, lora: Lora) -> Lora:
    """Return the settings with the names of the layers that `all-linear` stands for on a model."""
    if ALL_LINEAR not in lora.targets:
        return lora
    return replace(lora, targets=_names(model, adapted_layers(model, lora.targets)))


def _all_linear(model: nn.Module, layers: Mapping[str, Plain]) -> list[str]:
    parts_of_experts = EXPERT_PARTS if any(_ends(path, "experts") for path, _ in _bare_modules(model)) else ()
    return [
        path
        for path, layer in layers.items()
        if any(part.isdigit() for part in path.split("."))  # the number of its block
        and ROUTERS.isdisjoint(path.split("."))
        and path.rpartition(".")[2] not in parts_of_experts
        and features_of(layer)[1] > 1
        and (_mixer(model, path) is None or path.endswith(".in_proj"))
    ]


def _names(model: nn.Module, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest ends of paths that no other module's path has: what PEFT takes as `target_modules`."""
    chosen = set(paths)
    taken = {end for path, _ in _bare_modules(model) if path not in chosen for end in _ends_of(path)}
    return tuple(sorted({next(end for end in _ends_of(path) if end not in taken) for path in paths}))


def _ends_of(path: str) -> Iterator[str]:
    """Yield the ends of a path that begin with a word, shortest first."""
    parts = path.split(".")
    return (".".join(parts[first:]) for first in reversed(range(len(parts))) if not parts[first].isdigit())


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _bare_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a model's modules with their paths, as if it had no adapters."""
    banked: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if banked and path.startswith(banked):
            continue
        if isinstance(module, BankedLinear):
            banked = (*banked[-1:], f"{path}.")
        yield path, module.base if isinstance(module, BankedLinear) else module


def _refusal(model: nn.Module, path: str) -> str | None:
    """Return why a linear layer can have no adapter; None where it can."""
    if "experts" in path.split("."):
        return "its expert reads only the tokens that a router chose"
    if path.endswith(".dt_proj") and _mixer(model, path) is not None:
        return "the state-space scan reads its weight without calling the layer"
    return None


def _mixer(model: nn.Module, path: str) -> nn.Module | None:
    """Return the state-space mixer that a layer is part of, known by its own tensors A and D."""
    parent = model.get_submodule(path.rpartition(".")[0])
    own = {name for name, _ in parent.named_parameters(recurse=False)}
    return parent if {"A_log", "D"} <= own else None


def _no_such_layer(model: nn.Module, target: str, layers: Mapping[str, Plain]) -> str:
    known = sorted({path.rpartition(".")[2] for path in layers})
    listed = f" Known: {', '.join(known)}."
    way_out = f"{listed} `{ALL_LINEAR}` takes all that are fit for it."
    for path, module in _bare_modules(model):
        if is_linear(module) and _ends(path, target):
            why = (
                _refusal(model, path) or "it is the output head, which reads chosen tokens and not whole rows"
            )
            return f"`lora.targets` names '{target}', which can have no adapter: {why}.{way_out}"
    hint = did_you_mean(target, known)
    return (
        f"`lora.targets` names '{target}', no linear layer of this model below its output head."
        f"{'' if hint == listed else hint}{way_out}"
    )


def _output_head(model: nn.Module) -> nn.Module | None:
    """Return the layer that cannot have an adapter: it reads chosen tokens, not whole rows."""
    from transformers import PreTrainedModel

    head: nn.Module | None = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    return head
