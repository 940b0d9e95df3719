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
from dataclasses import dataclass, replace

from kapelle.errors import ModelError, did_you_mean
from kapelle.team import ALL_LINEAR, Lora

ROUTERS = frozenset({"router", "gate", "shared_expert_gate"})
"""Names of the layers that choose or weigh experts, or of what holds them."""

EXPERT_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"})
"""Names that the parts of an expert have or once had."""


@dataclass(frozen=True, slots=True)
class Layers:
    """The modules of a model, as if it had no adapters: what the choice reads of it."""

    model: str
    """Name of its class, for errors."""
    modules: frozenset[str]
    """Paths of all modules."""
    linear: Mapping[str, tuple[int, int]]
    """Path → features in and out of every linear layer, in the model's order."""
    head: str | None
    """Path of the output head."""
    mixers: frozenset[str] = frozenset()
    """Paths of state-space mixers, which have tensors A and D of their own."""


def linear_layers(layers: Layers) -> dict[str, tuple[int, int]]:
    """Return the features in and out of the layers that can have an adapter, by path."""
    return {
        path: features
        for path, features in layers.linear.items()
        if path != layers.head and _refusal(layers, path) is None
    }


def adapted_layers(layers: Layers, targets: Sequence[str]) -> list[str]:
    """Return the paths of the layers that targets name, in the model's order.

    Raises ModelError when a target names none, or one that cannot have an adapter.
    """
    fit = linear_layers(layers)
    chosen: set[str] = set()
    if ALL_LINEAR in targets:
        parts_of_experts = EXPERT_PARTS if any(_ends(path, "experts") for path in layers.modules) else ()
        chosen.update(
            path
            for path, (_, features_out) in fit.items()
            if any(part.isdigit() for part in path.split("."))  # the number of its block
            and ROUTERS.isdisjoint(path.split("."))
            and path.rpartition(".")[2] not in parts_of_experts
            and features_out > 1
            and (not _in_mixer(layers, path) or path.endswith(".in_proj"))
        )
        if not chosen:
            raise ModelError(f"`{ALL_LINEAR}` finds no linear layer in the blocks of {layers.model}.")
    for target in targets:
        found = [path for path in fit if _ends(path, target)]
        if target != ALL_LINEAR and not found:
            raise ModelError(_no_such_layer(layers, target, fit))
        chosen.update(found)
    return [path for path in fit if path in chosen]


def named(layers: Layers, lora: Lora) -> Lora:
    """Return the settings with the shortest names of the layers that their targets stand for on a model.

    So two settings are equal where their adapters go on the same layers. Raises ModelError as `adapted_layers`.
    """
    paths = adapted_layers(layers, lora.targets)
    # The shortest ends of paths that no other module's path has: what PEFT takes as `target_modules`.
    taken = {end for path in layers.modules.difference(paths) for end in _ends_of(path)}
    shortest = {next(end for end in _ends_of(path) if end not in taken) for path in paths}
    return replace(lora, targets=tuple(sorted(shortest)))


def _ends_of(path: str) -> Iterator[str]:
    """Yield the ends of a path that begin with a word, shortest first."""
    parts = path.split(".")
    return (".".join(parts[first:]) for first in reversed(range(len(parts))) if not parts[first].isdigit())


def _ends(path: str, target: str) -> bool:
    return path == target or path.endswith(f".{target}")


def _refusal(layers: Layers, path: str) -> str | None:
    """Return why a linear layer can have no adapter; None where it can."""
    if "experts" in path.split("."):
        return "its expert reads only the tokens that a router chose"
    if path.endswith(".dt_proj") and _in_mixer(layers, path):
        return "the state-space scan reads its weight without calling the layer"
    return None


def _in_mixer(layers: Layers, path: str) -> bool:
    return path.rpartition(".")[0] in layers.mixers


def _no_such_layer(layers: Layers, target: str, fit: Mapping[str, tuple[int, int]]) -> str:
    known = sorted({path.rpartition(".")[2] for path in fit})
    listed = f" Known: {', '.join(known)}."
    way_out = f"{listed} `{ALL_LINEAR}` takes all that are fit for it."
    for path in layers.linear:
        if _ends(path, target):
            why = (
                _refusal(layers, path)
                or "it is the output head, which reads chosen tokens and not whole rows"
            )
            return f"`lora.targets` names '{target}', which can have no adapter: {why}.{way_out}"
    hint = did_you_mean(target, known)
    return (
        f"`lora.targets` names '{target}', no linear layer of this model below its output head."
        f"{'' if hint == listed else hint}{way_out}"
    )
